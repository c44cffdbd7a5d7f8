"""Requests in, tokens out: the engine as programs use it, over one rank in this process or many in their own.

    with Engine(artifact) as engine:
        for result in engine.generate([[1, 2, 3], [4, 5]], Sampling(temperature=0.7, seed=1), max_tokens=64):
            print(result.ids)

A server calls `submit`, `cancel` and `step` instead, all from one thread.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from runtime_min.about import about
from runtime_min.core import Core
from runtime_min.launch import Run, loaded, world_of
from runtime_min.messages import Cancel, Close, Command, Event, Finish, Logprob, Stats, Submit
from runtime_min.remote import Remote
from runtime_min.request import Bounds, Limits, Request, RequestError
from runtime_min.sample import Sampling
from specs.errors import InputError


class EngineError(InputError):
    """The engine has failed as a whole, and with it every request that was under way."""


class Link(Protocol):
    """Where the ranks are. about: lines for whoever started them."""

    bounds: Bounds
    limits: Limits
    groups: int
    about: tuple[str, ...]

    @property
    def stats(self) -> Stats: ...

    def step(self, commands: list[Command], wait: float) -> list[Event]: ...

    def close(self) -> None: ...


class Local:
    """Rank 0 in this process; the other ranks, if there are any, follow on their own."""

    def __init__(self, core: Core, resources: ExitStack | None = None, about: tuple[str, ...] = ()) -> None:
        self.core, self.resources, self.about = core, resources, about
        self.bounds, self.limits, self.groups = core.bounds, core.limits, core.ranks.groups

    @property
    def stats(self) -> Stats:
        return self.core.stats

    def step(self, commands: list[Command], wait: float) -> list[Event]:
        return self.core.step(commands) if commands or self.core.busy else []

    def close(self) -> None:
        self.core.step([Close()])
        if self.resources is not None:
            self.resources.close()


@dataclass(slots=True)
class Result:
    """All of one request. finish: stop, length, cancelled or error. logprobs, one a token, and scored, one a prompt
    token after the first, if they were asked for; cached: prompt tokens from the prefix cache."""

    prompt: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    scored: list[Logprob] = field(default_factory=list)
    finish: Finish | None = None
    error: str | None = None
    cached: int = 0

    def add(self, event: Event) -> None:
        self.ids += event.tokens
        self.logprobs += event.logprobs
        self.scored += event.scored
        self.finish, self.error, self.cached = event.finish, event.error, event.cached


class Engine:
    """Requests under way by id. Not for several threads at once."""

    def __init__(self, artifact: Path | str, limits: Limits | None = None, **how: Any) -> None:
        """All ranks of an artifact on this machine; `how` are the other fields of Run (device, dtype, ops, ...).

        Raises InputError for whatever is wrong with the artifact, the devices or the limits.
        """
        run, limits = Run(artifact=Path(artifact), **how), limits or Limits()
        world = world_of(run)
        if world > 1:
            self._begin(Remote(run, limits, world))
            return
        with ExitStack() as resources:
            model, opened = resources.enter_context(loaded(run, 0, 1, None))
            core = Core.load(model, opened, limits)
            self._begin(Local(core, resources.pop_all(), about(core, opened)))

    @classmethod
    def over(cls, core: Core) -> Self:
        """An engine over rank 0 of ranks that are already running."""
        engine = cls.__new__(cls)
        engine._begin(Local(core))
        return engine

    def _begin(self, link: Link) -> None:
        self.link, self.bounds = link, link.bounds
        self.commands: list[Command] = []
        self.unfinished: set[int] = set()
        self.failed: str | None = None
        self.next = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def most(self) -> int:
        """Requests that may be under way at once."""
        return (self.link.limits.running + self.link.limits.waiting) * self.link.groups

    @property
    def stats(self) -> Stats:
        return self.link.stats

    def submit(self, request: Request) -> int:
        """The id of a new request. RequestError if it can never run, or if too many are under way; EngineError if the
        engine has failed."""
        if self.failed is not None:
            raise EngineError(self.failed)
        self.bounds.check(request)
        if len(self.unfinished) >= self.most:
            raise RequestError(
                f"engine: {len(self.unfinished)} requests are under way, {self.most} are allowed; try later"
            )
        seed = request.sampling.seed
        seed = secrets.randbits(63) if seed is None else seed & (1 << 63) - 1
        self.commands.append(Submit(id=self.next, request=request, seed=seed))
        self.unfinished.add(self.next)
        self.next += 1
        return self.next - 1

    def cancel(self, id: int) -> None:
        """Ends a request at the next step; its last event says so. Nothing happens if it has ended."""
        if id in self.unfinished:
            self.commands.append(Cancel(id=id))

    def step(self, wait: float = 0.0) -> list[Event]:
        """Goes on, waiting up to `wait` seconds for news. A failed engine gives every request one error event."""
        if self.failed is not None:
            return []
        commands, self.commands = self.commands, []
        try:
            events = self.link.step(commands, wait)
        except Exception as e:
            self.failed = str(e) or repr(e)
            events = [Event(id=id, finish="error", error=self.failed) for id in sorted(self.unfinished)]
        self.unfinished -= {e.id for e in events if e.finish is not None}
        return events

    def generate(
        self,
        prompts: Iterable[Sequence[int] | Request],
        sampling: Sampling | None = None,
        *,
        max_tokens: int = 128,
        stops: frozenset[int] = frozenset(),
        listen: Callable[[int, Event], None] | None = None,
    ) -> list[Result]:
        """Results in the order of the prompts: token ids, which the other arguments complete, or whole requests.

        listen(place of the prompt, event) is called as tokens arrive. A request that fails has its own error; if the
        engine does, EngineError is raised. Every prompt is checked before the first one runs.
        """
        requests = [
            p
            if isinstance(p, Request)
            else Request(prompt=tuple(p), max_tokens=max_tokens, sampling=sampling or Sampling(), stops=stops)
            for p in prompts
        ]
        for request in requests:
            self.bounds.check(request)
        results = [Result(r.prompt) for r in requests]
        places: dict[int, int] = {}
        left = list(reversed(range(len(requests))))
        while left or places:
            while left and len(self.unfinished) < self.most:
                place = left.pop()
                places[self.submit(requests[place])] = place
            for event in self.step(wait=1.0):
                if event.id not in places:
                    continue
                place = places[event.id] if event.finish is None else places.pop(event.id)
                results[place].add(event)
                if listen is not None:
                    listen(place, event)
            if self.failed is not None:
                raise EngineError(self.failed)
        return results

    def close(self) -> None:
        """Ends all ranks. What is under way ends without another event."""
        self.failed = self.failed or "the engine was closed"
        self.link.close()
