"""Pictures from other hosts, for servers that were told to fetch them."""

import http.client
import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from runtime_min.vision.picture import MAX_BYTES
from runtime_min.vision.rule import MediaError

HOPS = 3
BLOCK = 1 << 16
MOVED = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """hosts: whose pictures may be fetched; `*` stands for every host with a public address, and only a host that is
    named may have a private one. seconds: of a whole fetch."""

    hosts: frozenset[str]
    seconds: float = 10.0
    most: int = MAX_BYTES

    def __call__(self, where: str, url: str) -> bytes:
        """The bytes at an http or https address; MediaError that begins with `where` if they may not or cannot be had.

        An address is looked up once, checked, and then connected to, on every redirect anew.
        """
        deadline = time.monotonic() + self.seconds
        try:
            for _ in range(HOPS):
                found = self._get(where, url, deadline)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except (OSError, ValueError, http.client.HTTPException) as e:
            if isinstance(e, MediaError):
                raise
            raise MediaError(f"{where}: cannot be fetched: {e}") from e
        raise MediaError(f"{where}: was redirected {HOPS} times")

    def _get(self, where: str, url: str, deadline: float) -> bytes | str:
        """The body, or where it has moved."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise MediaError(f"{where}: leads to an address that is not fetched")
        address, port = self._allowed(where, parts)
        connection = http.client.HTTPConnection(parts.hostname, port)
        connection.sock = socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic()))
        try:
            if parts.scheme == "https":
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(connection.sock, server_hostname=parts.hostname)
            target = parts.path or "/"
            connection.request(
                "GET", f"{target}?{parts.query}" if parts.query else target, headers={"Host": parts.netloc}
            )
            answer = connection.getresponse()
            if answer.status in MOVED and answer.getheader("location"):
                return str(answer.getheader("location"))
            if answer.status != 200:
                raise MediaError(f"{where}: the other host answers {answer.status}")
            data = bytearray()
            while block := answer.read(BLOCK):
                data += block
                if len(data) > self.most:
                    raise MediaError(f"{where}: more than {self.most:,} bytes, the most that are taken")
                if time.monotonic() > deadline:
                    raise MediaError(f"{where}: not fetched within {self.seconds:g} s")
            return bytes(data)
        finally:
            connection.close()

    def _allowed(self, where: str, parts: SplitResult) -> tuple[str, int]:
        """The address and port to connect to."""
        host = str(parts.hostname)
        if host not in self.hosts and "*" not in self.hosts:
            raise MediaError(f"{where}: pictures of {host} are not fetched here; send a data URL")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        for address in found if host not in self.hosts else ():
            ip = ipaddress.ip_address(address.partition("%")[0])
            ip = getattr(ip, "ipv4_mapped", None) or ip
            if not ip.is_global or ip.is_multicast:
                raise MediaError(
                    f"{where}: {host} is at the private address {address}; the server must name it to fetch"
                )
        return found[0], port
