"""The server as a process: a socket, a drain before the end, and a line of status now and then."""

import asyncio
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from runtime_min.messages import Stats
from runtime_min.serve.app import app_of
from runtime_min.serve.http import to_stderr
from runtime_min.serve.server import Server
from specs.errors import InputError

# Seconds for connections to close once nothing is under way any more.
CLOSING = 3
BACKLOG = 2048


class ServeError(InputError):
    """The server cannot be started here."""


def bound(host: str, port: int) -> socket.socket:
    """A socket that others can reach at host:port; ServeError if it is taken or not ours. Port 0: any free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # With the protocol named, asyncio sends small pieces at once; else each chunk would wait 40 ms for the last.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
        return sock
    except OSError as e:
        raise ServeError(
            f"{host}:{port}: cannot listen there: {e.strerror or e}; choose another --host or --port"
        ) from e


class Serving(uvicorn.Server):
    """Ends in order: at the first signal new requests are refused and those under way go on, up to `drain` seconds;
    then connections close. A second signal ends at once."""

    def __init__(self, config: uvicorn.Config, server: Server, drain: float, log: Callable[[str], None]) -> None:
        super().__init__(config)
        self.server, self.drain, self.log = server, drain, log
        self.until = math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.server.draining:
            self.should_exit = self.force_exit = True
            return
        self.server.draining = True
        self.until = time.monotonic() + self.drain
        self.log(f"{signal.Signals(sig).name}: no new requests; {self.server.active} under way have {self.drain:g} s")

    async def on_tick(self, counter: int) -> bool:
        if self.server.draining and (not self.server.active or time.monotonic() > self.until):
            self.should_exit = True
        return await super().on_tick(counter)


def serve(server: Server, sock: socket.socket, drain: float, interval: float) -> None:
    """Serves until a signal ends it. interval: seconds between lines of status, 0 for none."""
    app = app_of(server)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSING, server_header=False
    )
    serving = Serving(config, server, drain, to_stderr)

    async def run() -> None:
        lines = asyncio.create_task(status_lines(server, interval)) if interval else None
        try:
            await serving.serve([sock])
        finally:
            if lines is not None:
                lines.cancel()

    asyncio.run(run())
    to_stderr("ended")


async def status_lines(server: Server, interval: float, log: Callable[[str], None] = to_stderr) -> None:
    """A line every `interval` seconds in which something was under way."""
    told = status(server)
    next(told)
    while True:
        await asyncio.sleep(interval)
        line = next(told)
        if line is not None:
            log(line)


def status(server: Server) -> Iterator[str | None]:
    """Lines about the time since the one before; None if nothing went on."""
    metrics, then, before = server.metrics, time.monotonic(), (0.0, 0.0)
    while True:
        now, made = time.monotonic(), (metrics.total(metrics.made), metrics.total(metrics.prompt))
        rates = [(a - b) / max(now - then, 1e-9) for a, b in zip(made, before, strict=True)]
        busy = server.pump.busy or any(rates)
        then, before = now, made
        yield (
            f"status: {told(server.pump.engine.stats)}, {rates[0]:.1f} tokens/s out, {rates[1]:.1f} in"
            if busy
            else None
        )


def told(stats: Stats) -> str:
    """The engine's part of a line of status."""
    used = 100 * (stats.pages - stats.free) / max(1, stats.pages)
    drafts = f", accept length {stats.drafts.length:.2f}" if stats.drafts is not None and stats.drafts.drafts else ""
    extra = f", {stats.preempted} preemptions" if stats.preempted else ""
    extra += f", COMPILED {stats.compiled} KERNELS WHILE SERVING" if stats.compiled else ""
    return f"{stats.running} running, {stats.waiting} queued, cache {used:.0f}%{drafts}{extra}"
