"""An engine double that says what it is told to, behind the real server; and that server on a port of this machine."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from runtime_min.messages import Event, Logprob, Stats
from runtime_min.request import Bounds, Request
from runtime_min.serve.run import bound

Script = Sequence[Sequence[int]]


@dataclass
class Scripted:
    """Gives each request the groups of ids that `script` says, a group a step, and keeps the engine's promises: a stop
    id or max_tokens ends a request, a cancelled one says so. pause: seconds a step takes."""

    script: Callable[[Request], Script]
    bounds: Bounds
    most: int = 8
    pause: float = 0.0
    failed: str | None = None
    unfinished: set[int] = field(default_factory=set)
    requests: list[Request] = field(default_factory=list)
    left: dict[int, list[list[int]]] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    pending: list[Event] = field(default_factory=list)
    crash: str | None = None
    closed: bool = False

    @property
    def stats(self) -> Stats:
        return Stats(running=len(self.unfinished))

    def submit(self, request: Request) -> int:
        self.bounds.check(request)
        id = len(self.requests)
        self.requests.append(request)
        self.left[id], self.made[id] = [list(g) for g in self.script(request)], 0
        self.unfinished.add(id)
        return id

    def cancel(self, id: int) -> None:
        if id in self.unfinished:
            self.cancelled.append(id)
            self.pending.append(Event(id=id, finish="cancelled"))

    def step(self, wait: float = 0.0) -> list[Event]:
        if self.crash is not None:
            self.failed = self.crash
            events = [Event(id=id, finish="error", error=self.failed) for id in sorted(self.unfinished)]
            self.unfinished.clear()
            return events
        time.sleep(self.pause)
        events, self.pending = self.pending, []
        gone = {e.id for e in events}
        events += [self._next(id) for id in sorted(self.unfinished - gone) if self.left[id]]
        self.unfinished -= {e.id for e in events if e.finish is not None}
        return events

    def _next(self, id: int) -> Event:
        request, group = self.requests[id], self.left[id].pop(0)
        tokens: list[int] = []
        finish: Any = None
        for token in group:
            tokens.append(token)
            self.made[id] += 1
            if token in request.stops:
                finish = "stop"
            elif self.made[id] == request.max_tokens:
                finish = "length"
            if finish is not None:
                break
        tops = request.sampling.logprobs
        told = () if tops is None else tuple(logprob(t, tops) for t in tokens)
        scored: tuple[Logprob, ...] = ()
        if request.scored and self.made[id] == len(tokens):
            scored = tuple(logprob(t, tops or 0) for t in request.prompt[1:])
        return Event(id=id, tokens=tuple(tokens), logprobs=told, scored=scored, finish=finish, cached=2)

    def close(self) -> None:
        self.closed = True


def logprob(token: int, tops: int) -> Logprob:
    return Logprob(token=token, logprob=-0.5, top=tuple((token + i, -0.5 - i) for i in range(tops)))


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of `app`, served by uvicorn on a thread."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    with bound("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.started
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "has not happened in time"
        time.sleep(0.005)
