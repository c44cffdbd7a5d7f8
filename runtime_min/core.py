"""One rank's engine: commands in, events out, one step at a time.

Every rank runs this same deterministic code on the same commands, which rank 0 shares at the beginning of a step, so no
plan is ever sent. Groups of ranks (tp < world) each have a scheduler, and all ranks know all of them. A step is
launched before the previous one is read: a decode token goes from sampling to the next step on the device, and the host
reads it while that step runs. A request that turns out to have ended is in one step too many, whose result is dropped.
"""

import sys
from collections.abc import Callable
from typing import Any, Self

from runtime_min.artifact import Artifact
from runtime_min.embeddings import Embeddings, Encode
from runtime_min.graphs import Graphs
from runtime_min.graphs import sizes as counts
from runtime_min.kernels.jit import Jit
from runtime_min.memory import HOST_TOKENS, MemoryPlan, measured
from runtime_min.messages import Close, Command, Event, Finish, Logprob, Stats, Submit
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Pool
from runtime_min.request import Bounds, Limits
from runtime_min.runner import Entry, Flight, Runner
from runtime_min.sampler import FIXED, Row, Sampler
from runtime_min.scheduler import Active, Scheduler
from runtime_min.text import Tokenizer
from runtime_min.vision.encoder import Encoder
from runtime_min.warm import warm
from specs.errors import InputError

Constrain = Callable[[str], Any]


class Core:
    """Requests of all groups, and the tensors of this rank."""

    def __init__(
        self, model: Decoder, limits: Limits, encode: Encode | None = None, constrain: Constrain | None = None
    ) -> None:
        """encode: what makes embeddings of requests' pictures, None where there can be none; constrain: a request's
        place in its compiled grammar, likewise."""
        self.model, self.ranks, self.limits, self.constrain = model, model.ranks, limits, constrain
        self.ranks.agree({"limits": repr(limits)})
        context = min(limits.context or model.dims.context, model.cos.shape[0])
        if model.settings.device.type == "cuda" and isinstance(model.ops.kernels, Jit):
            warm(model, limits.step_tokens)
        self.memory: MemoryPlan | None = measured(model, limits, context, encode)
        size = limits.page_tokens
        pages = -(-(limits.cache_tokens or HOST_TOKENS) // size) if self.memory is None else self.memory.pages
        pages = min(self.ranks.every(pages))
        cache = model.cache(pages * size, size)
        pools = [cache.pool if g == self.ranks.group else Pool(pages, size) for g in range(self.ranks.groups)]
        self.schedulers = [Scheduler(pool, limits) for pool in pools]
        self.bounds = Bounds(
            vocab=model.dims.vocab, context=context, cache_tokens=pages * size, sees=encode is not None
        )
        graphs: Graphs | None = None
        if self.memory is not None and limits.graphs and model.ops.kernels is not None:
            graphs = Graphs(model, cache, counts(limits.graphs), 1, cache.pool.count(min(context, pages * size)))
            graphs.capture()
        sampler = Sampler(limits.running, model.dims.vocab, model.settings.device)
        embeddings = None if encode is None else Embeddings(encode, limits.pictures)
        self.runner = Runner(model=model, cache=cache, sampler=sampler, graphs=graphs, embeddings=embeddings)
        self.active: dict[int, tuple[Scheduler, Active]] = {}
        self.flight: Flight | None = None
        self.closed = False
        self.ready = self.compiled
        if self.ranks.rank == 0:
            sys.stderr.write("".join(f"{line}\n" for line in self._lines()))

    @classmethod
    def load(cls, model: Decoder, artifact: Artifact, limits: Limits) -> Self:
        """The core over an artifact's model, and over its vision part if it has one."""
        seeing = artifact.has_vision
        encode = Encoder.load(artifact, model.ops, model.ranks, model.settings) if seeing else None
        return cls(model, limits, encode, _constrain(artifact) if limits.grammars else None)

    def _lines(self) -> list[str]:
        """What is told at the start: what memory is spent on, and what can be asked from now on."""
        graphs = self.runner.graphs
        captured = "no graphs" if graphs is None else f"graphs of {', '.join(map(str, graphs.counts))} tokens"
        b, groups, running = self.bounds, self.ranks.groups, self.limits.running
        ready = (
            f"ready: {groups * running} requests at once, {groups * b.cache_tokens} tokens in the cache, context "
            f"{b.context}, {captured}, {self.ready} kernels compiled here"
        )
        return [ready] if self.memory is None else [self.memory.line(), ready]

    @property
    def compiled(self) -> int:
        """Kernels that were compiled in this process so far. Past `ready` it must not grow."""
        kernels = self.model.ops.kernels
        return 0 if kernels is None else kernels.compiled

    @property
    def stats(self) -> Stats:
        s = self.schedulers
        return Stats(
            running=sum(len(x.running) for x in s),
            waiting=sum(len(x.waiting) for x in s),
            pages=sum(x.pool.pages for x in s),
            free=sum(x.pool.available for x in s),
            preempted=sum(x.preempted for x in s),
            compiled=self.compiled - self.ready,
        )

    @property
    def busy(self) -> bool:
        return bool(self.active) or self.flight is not None

    def step(self, commands: list[Command]) -> list[Event]:
        """Obeys rank 0's commands, launches the next step, reads the one before. Every call with requests under way
        does one of the latter two, or something is wrong with the scheduler, and that is raised."""
        events = [event for command in self.ranks.shared(commands) for event in self._obey(command)]
        plans = [s.plan() for s in self.schedulers]
        flight, self.flight = self.flight, self.runner.launch(plans) if any(plans) else None
        if flight is not None:
            events += self._read(flight)
        elif self.flight is None and self.active:
            raise RuntimeError(f"engine: {len(self.active)} requests, none of which can go on: {sorted(self.active)}")
        return events

    def follow(self) -> None:
        """Ranks other than 0: steps until rank 0 closes."""
        while not self.closed:
            self.step([])

    def _obey(self, command: Command) -> list[Event]:
        if isinstance(command, Close):
            self.closed = True
        elif isinstance(command, Submit):
            return self._admit(command)
        elif command.id in self.active:
            return [self._end(self.active[command.id][1], "cancelled")]
        return []

    def _admit(self, command: Submit) -> list[Event]:
        """A new request goes to the group with the fewest; pictures are looked at first."""
        scheduler = min(self.schedulers, key=lambda s: len(s.running) + len(s.waiting))
        request = command.request
        a = Active(command.id, request, command.seed, list(request.prompt))
        if self.runner.embeddings is not None:
            try:
                for m in request.media:
                    self.runner.embeddings.encode.check(m.item, m.tokens)
            except InputError as e:
                return [Event(id=a.id, finish="error", error=f"pictures: {e}")]
        if request.grammar is not None:
            if self.constrain is None:
                return [Event(id=a.id, finish="error", error="grammars: this engine was started without them")]
            a.constraint = self.constrain(request.grammar)
        self.active[a.id] = scheduler, a
        scheduler.add(a)
        return []

    def _end(self, a: Active, finish: Finish, **news: Any) -> Event:
        scheduler, _ = self.active.pop(a.id)
        scheduler.finish(a, poisoned=finish == "error")
        return Event(id=a.id, finish=finish, cached=a.cached or 0, **news)

    def _read(self, flight: Flight) -> list[Event]:
        events = []
        for group, results in zip(flight.entries, flight.read(), strict=True):
            for e in group:
                if not e.active.done:
                    events += self._heard(e, results[e.first : e.first + len(e.rows)])
        return events

    def _heard(self, e: Entry, results: list[list[float]]) -> list[Event]:
        """What one request's rows of a step mean for it."""
        a = e.active
        a.pending -= e.sampled
        if not all(r[1] for r in results):
            return [self._end(a, "error", error=f"logits after token {e.length} are not finite; the request was ended")]
        self.active[a.id][0].commit(a, e.length)
        told = [_logprob(r, row) for r, row in zip(results, e.rows, strict=True)]
        known = [(row.position, p) for p, row in zip(told, e.rows, strict=True) if row.target is not None]
        # After a preemption prompt tokens are computed again; they are reported once.
        scored = tuple(p for position, p in known if p is not None and position > a.scored)
        a.scored += len(scored)
        if not e.sampled:
            return [Event(id=a.id, scored=scored)] if scored else []
        token, last = int(results[-1][0]), told[-1]
        a.tokens.append(token)
        news: dict[str, Any] = {"tokens": (token,), "logprobs": () if last is None else (last,), "scored": scored}
        if token in a.request.stops:
            return [self._end(a, "stop", **news)]
        if len(a.tokens) - len(a.request.prompt) == a.request.max_tokens:
            return [self._end(a, "length", **news)]
        return [Event(id=a.id, cached=a.cached or 0, **news)]


def _constrain(artifact: Artifact) -> Constrain:
    """Places in grammars over the tokens of an artifact."""
    from runtime_min.grammar import Constraint, vocabulary

    known = vocabulary(Tokenizer.open(artifact.path))
    return lambda compiled: Constraint(compiled, known)


def _logprob(result: list[float], row: Row) -> Logprob | None:
    wanted = row.sampling.logprobs
    if wanted is None:
        return None
    tops = (len(result) - FIXED) // 2
    pairs = zip(map(int, result[FIXED : FIXED + tops]), result[FIXED + tops :], strict=True)
    token = int(result[0]) if row.target is None else row.target
    return Logprob(token=token, logprob=result[2], top=tuple(pairs)[:wanted])
