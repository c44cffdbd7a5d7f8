"""The engine on a thread of its own, and its events on the event loop of the server."""

import asyncio
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from runtime_min.messages import Event, Stats
from runtime_min.request import Bounds, Request
from runtime_min.serve.errors import ApiError

T = TypeVar("T")
# Seconds: between looks at an idle engine, and the longest that a new request waits for a busy one to look up.
IDLE, BUSY = 1.0, 0.005


class Runs(Protocol):
    """What the server needs of an engine; all of it is called from one thread."""

    bounds: Bounds
    failed: str | None

    @property
    def unfinished(self) -> set[int]: ...

    @property
    def most(self) -> int: ...

    @property
    def stats(self) -> Stats: ...

    def submit(self, request: Request) -> int: ...

    def cancel(self, id: int) -> None: ...

    def step(self, wait: float = 0.0) -> list[Event]: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """Requests that were submitted together. events: (which of them, event), until each has had its last."""

    ids: list[int] = field(default_factory=list)
    events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)


class Pump:
    """Submits, cancels and steps an engine. `open` and `close` are called on the event loop."""

    def __init__(self, engine: Runs, heard: Callable[[Event], None] = lambda event: None) -> None:
        """heard is called on the event loop with every event of every request."""
        self.engine, self.heard = engine, heard
        self.tickets: dict[int, tuple[Ticket, int]] = {}
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def failed(self) -> str | None:
        """Why nothing can run any more, or None."""
        if self.engine.failed is None and self._loop is not None and not self._thread.is_alive():
            return "the engine's thread has ended"
        return self.engine.failed

    @property
    def busy(self) -> int:
        return len(self.engine.unfinished)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the engine, and with it whatever is under way."""
        if self._thread.is_alive():
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join)

    async def open(self, requests: Sequence[Request]) -> Ticket:
        """Submits all requests or none. ApiError 429 if there is no room in the queue, 503 if the engine has failed;
        RequestError for one that can never run."""
        ticket = Ticket()

        def submit() -> None:
            if self.engine.failed is not None:
                raise ApiError(503, f"the engine has failed: {self.engine.failed}")
            for request in requests:
                self.engine.bounds.check(request)
            busy, most = len(self.engine.unfinished), self.engine.most
            if busy + len(requests) > most:
                raise ApiError(429, f"{busy} requests are under way, {most} are allowed; try again later", retry=1)
            for place, request in enumerate(requests):
                id = self.engine.submit(request)
                ticket.ids.append(id)
                self.tickets[id] = ticket, place

        try:
            await self._ordered(submit)
        except asyncio.CancelledError:
            self.close(ticket)
            raise
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Ends what is still under way of a ticket, whose events nobody reads any more."""

        def cancel() -> None:
            for id in ticket.ids:
                self.tickets.pop(id, None)
                self.engine.cancel(id)

        self._orders.put(cancel)

    def cancel(self, ticket: Ticket, place: int) -> None:
        """Ends one request of a ticket."""
        self._orders.put(lambda: self.engine.cancel(ticket.ids[place]))

    async def _ordered(self, order: Callable[[], T]) -> T:
        """What `order` gives on the engine's thread."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(order())
            except BaseException as e:
                future.set_exception(e)

        if not self._thread.is_alive():
            raise ApiError(503, f"the engine has failed: {self.failed}")
        self._orders.put(run)
        # An order that has begun is not taken back, so that no request is left without its ticket.
        return await asyncio.shield(asyncio.wrap_future(future))

    def _run(self) -> None:
        try:
            while self._obey():
                events = self.engine.step(BUSY if self.engine.unfinished else 0.0)
                if events:
                    self._deliver(events)
        except Exception as e:
            traceback.print_exc()
            self.engine.failed = f"{type(e).__name__}: {e}"
            self._deliver([Event(id=id, finish="error", error=self.engine.failed) for id in self.tickets])
            # Whoever still asks is answered.
            while self._obey():
                pass
        finally:
            self.engine.close()

    def _obey(self) -> bool:
        """Carries out orders, waiting for the first if there is nothing else to do; False for the last one."""
        wait = 0.0 if self.engine.unfinished and self.engine.failed is None else IDLE
        try:
            order = self._orders.get(timeout=wait) if wait else self._orders.get_nowait()
            while order is not None:
                order()
                order = self._orders.get_nowait()
        except queue.Empty:
            return True
        return False

    def _deliver(self, events: Sequence[Event]) -> None:
        known: list[tuple[Ticket, int, Event]] = []
        for event in events:
            found = self.tickets.get(event.id) if event.finish is None else self.tickets.pop(event.id, None)
            if found is not None:
                known.append((*found, event))
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._spread, list(events), known)
        except RuntimeError:
            sys.stderr.write("engine: the server's loop has ended; events are dropped\n")

    def _spread(self, events: Sequence[Event], known: Sequence[tuple[Ticket, int, Event]]) -> None:
        for event in events:
            self.heard(event)
        for ticket, place, event in known:
            ticket.events.put_nowait((place, event))
