"""Pictures in requests: what they become in the prompt, what is refused and how it is named, what may be fetched."""

import base64
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from PIL import Image

from runtime_min.serve.fetch import Fetch
from runtime_min.vision.rule import MediaError


def png(size: tuple[int, int] = (29, 28), mode: str = "RGB", **how: Any) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, how.pop("format", "PNG"), **how)
    return out.getvalue()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def asked(*urls: str, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": [*({"type": "image_url", "image_url": {"url": u}} for u in urls)]}]


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[str, list[str]]]:
    """(address, paths asked for) of a little web server with a picture."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            moved = {"/loop": "/loop", "/moved": "/red.png?x=1", "/out": "http://127.0.0.2:9/x"}.get(self.path)
            status = 302 if moved else 200 if self.path.startswith(("/red.png", "/large")) else 404
            self.send_response(status)
            if moved:
                self.send_header("location", moved)
            self.end_headers()
            if status == 200:
                self.wfile.write(png() if "red" in self.path else b"x" * 5000)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_private_addresses_are_fetched_only_when_named(host: tuple[str, list[str]]) -> None:
    address, seen = host
    for hosts in ({"*"}, {"example.org"}, set()):
        with pytest.raises(MediaError, match=r"^here: .*(private address|not fetched)"):
            Fetch(hosts=frozenset(hosts))("here", f"{address}/red.png")
    for inside in ("http://localhost/x", "http://[::1]/x", "http://169.254.1.1/x", "http://[::ffff:10.0.0.1]/x",
                   "http://0.0.0.0/x", "http://0x7f000001/x"):  # fmt: skip
        with pytest.raises(MediaError, match="private address"):
            Fetch(hosts=frozenset("*"))("here", inside)
    assert seen == []
    named = Fetch(hosts=frozenset({"127.0.0.1"}), most=4000)
    assert named("here", f"{address}/red.png") == png() == named("here", f"{address}/moved")
    assert seen == ["/red.png", "/moved", "/red.png?x=1"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none", "answers 404"),
        ("/loop", "redirected 3 times"),
        ("/out", "127.0.0.2 are not fetched"),
        ("/large", "more than 4,000 bytes"),
    ],
)
def test_what_cannot_be_fetched(host: tuple[str, list[str]], path: str, message: str) -> None:
    with pytest.raises(MediaError, match=f"^here: .*{message}"):
        Fetch(hosts=frozenset({"127.0.0.1"}), most=4000)("here", host[0] + path)


def test_odd_addresses(host: tuple[str, list[str]]) -> None:
    fetch = Fetch(hosts=frozenset({"127.0.0.1"}))
    for odd in ("http://u:p@127.0.0.1/x", "http:///x", "http://127.0.0.1:99999/x", "http://127.0.0.1:1/x"):
        with pytest.raises(MediaError, match=r"^here: "):
            fetch("here", odd)


def test_pictures_in_the_prompt(bench: Any, host: tuple[str, list[str]]) -> None:
    fetch = Fetch(hosts=frozenset({"127.0.0.1"}))
    large, small = png((100, 60)), png()
    with bench(fetch=fetch) as b:
        for urls in ((url(small), url(large), url(small)), (f"{host[0]}/red.png", url(large), url(small))):
            answer = b.chat(messages=[*asked(*urls), {"role": "assistant", "content": "ok"}, *asked(url(large))])
            assert answer.status_code == 200, answer.text
        first, second = b.engine.requests
        # The same pictures are the same requests, however they came.
        assert first.prompt == second.prompt and [m.digest for m in first.media] == [m.digest for m in second.media]
        assert [m.tokens for m in first.media] == [2, 12, 2, 12]
        pad = b.server.served.tokenizer.special("<|media_pad|>")
        assert [i for m in first.media for i in range(m.position, m.end)] == [
            i for i, token in enumerate(first.prompt) if token == pad
        ]
        assert first.media[0].digest == first.media[2].digest != first.media[1].digest
        tool = [{"role": "tool", "tool_call_id": "x", "content": asked(url(small))[0]["content"]}]
        assert b.chat(messages=tool).status_code == 200


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (url(png()[:60]), "damaged"),
        (url(b"no picture"), "is no picture"),
        ("data:image/png;base64,@@@", "base64"),
        ("data:image/png,abc", "data:image/TYPE;base64"),
        ("http://127.0.0.1/x.png", "not fetched"),
        ("file:///etc/passwd", "files are not read here"),
        ("/etc/passwd", "files are not read here"),
        ("ftp://x/y", "not fetched"),
        (url(png((1 << 15, 1 << 15), "1")), "too many pixels"),
    ],
)
def test_pictures_that_are_refused(bench: Any, data: str, message: str) -> None:
    with bench() as b:
        answer = b.chat(messages=asked(url(png()), data))
        assert answer.status_code == 400 and b.engine.requests == []
        said = answer.json()["error"]["message"]
        assert said.startswith("messages[0].content[1]") and message in said


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_modes(bench: Any, mode: str) -> None:
    with bench() as b:
        data = png((1, 1), mode, format="JPEG" if mode == "CMYK" else "PNG")
        assert b.chat(messages=asked(url(data))).status_code == 200
        assert [m.tokens for m in b.engine.requests[0].media] == [1]
