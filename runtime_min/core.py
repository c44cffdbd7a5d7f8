"""One rank's engine: commands in, events out, one step at a time.

Every rank runs this same deterministic code on the same commands, which rank 0 shares at the beginning of a step, so no
plan is ever sent. Groups of ranks (tp < world) each have a scheduler, and all ranks know all of them. A step is
launched before the previous one is read: a decode token goes from sampling to the next step on the device, and the host
reads it while that step runs. A request that turns out to have ended is in one step too many, whose result is dropped.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime_min.graphs import Graphs, sizes
from runtime_min.kv import Batch, batch, upload
from runtime_min.memory import HOST_TOKENS, MemoryPlan, measured
from runtime_min.messages import Close, Command, Event, Finish, Logprob, Submit
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Pool, Sequence
from runtime_min.request import Bounds, Limits
from runtime_min.sample import Sampling
from runtime_min.sampler import FIXED, Row, Sampler
from runtime_min.scheduler import Active, Scheduler
from runtime_min.warm import warm

Plan = list[tuple[Active, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One request in a launched step: cached tokens after it, whether a token was sampled, its rows of results."""

    active: Active
    length: int
    sampled: bool
    first: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A launched step. entries: of every group; results [groups, rows, columns] float64, on the host when `landed`."""

    entries: tuple[tuple[Entry, ...], ...]
    results: Tensor
    landed: Any

    def read(self) -> list[list[list[float]]]:
        if self.landed is not None:
            self.landed.synchronize()
        out: list[list[list[float]]] = self.results.tolist()
        return out


class Core:
    """Requests of all groups, and the tensors of this rank."""

    def __init__(self, model: Decoder, limits: Limits) -> None:
        self.model, self.ranks, self.limits = model, model.ranks, limits
        self.ranks.agree({"limits": repr(limits)})
        context = min(limits.context or model.dims.context, model.cos.shape[0])
        warm(model, limits.step_tokens)
        self.memory: MemoryPlan | None = measured(model, limits, context)
        size = limits.page_tokens
        pages = -(-(limits.cache_tokens or HOST_TOKENS) // size) if self.memory is None else self.memory.pages
        pages = min(self.ranks.every(pages))
        self.cache = model.cache(pages * size, size)
        pools = [self.cache.pool if g == self.ranks.group else Pool(pages, size) for g in range(self.ranks.groups)]
        self.schedulers = [Scheduler(pool, limits) for pool in pools]
        self.bounds = Bounds(vocab=model.dims.vocab, context=context, cache_tokens=pages * size)
        self.sampler = Sampler(limits.running, model.dims.vocab, model.settings.device)
        self.graphs: Graphs | None = None
        if self.memory is not None and limits.graphs and model.ops.kernels is not None:
            width = self.cache.pool.count(min(context, pages * size))
            self.graphs = Graphs(model, self.cache, sizes(limits.graphs), 1, width)
            self.graphs.capture()
        self.active: dict[int, tuple[Scheduler, Active]] = {}
        self.flight: Flight | None = None
        self.closed = False
        self.ready = self.compiled

    @property
    def compiled(self) -> int:
        """Kernels that were compiled in this process so far. Past `ready` it must not grow."""
        kernels = self.model.ops.kernels
        return 0 if kernels is None else kernels.compiled

    @property
    def busy(self) -> bool:
        return bool(self.active) or self.flight is not None

    def step(self, commands: list[Command]) -> list[Event]:
        """Obeys rank 0's commands, launches the next step, reads the one before. Every call with requests under way
        does one of the latter two, or something is wrong with the scheduler, and that is raised."""
        events = [event for command in self.ranks.shared(commands) for event in self._obey(command)]
        flight, self.flight = self.flight, self._launch()
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
            scheduler = min(self.schedulers, key=lambda s: len(s.running) + len(s.waiting))
            a = Active(command.id, command.request, command.seed, list(command.request.prompt))
            self.active[a.id] = scheduler, a
            scheduler.add(a)
        elif command.id in self.active:
            return [self._end(self.active[command.id][1], "cancelled")]
        return []

    def _end(self, a: Active, finish: Finish, **news: Any) -> Event:
        scheduler, _ = self.active.pop(a.id)
        scheduler.finish(a, poisoned=finish == "error")
        return Event(id=a.id, finish=finish, cached=a.cached or 0, **news)

    def _launch(self) -> Flight | None:
        """Plans and starts a step of all groups."""
        plans = [s.plan() for s in self.schedulers]
        if not any(plans):
            return None
        entries = [_entries(plan) for plan in plans]
        mine = plans[self.ranks.group]
        for a, _ in mine:
            if a.request.sampling.penalised and not a.counted and a.slot is not None:
                n = len(a.request.prompt)
                self.sampler.admit(a.slot, a.tokens[:n], a.tokens[n:])
                a.counted = True
        logits = self._forward(plans)
        rows = [r for e in entries[self.ranks.group] for r in e.rows]
        tops = [r.sampling.logprobs for es in entries for e in es for r in e.rows if r.sampling.logprobs is not None]
        found = self.sampler(logits, rows, min(max(tops), self.bounds.vocab) if tops else None, self.ranks.agreed)
        for group in entries:
            for e in group:
                e.active.sequence.length = e.length
                e.active.pending += e.sampled
        return self._sent(found, tuple(map(tuple, entries)))

    def _forward(self, plans: list[Plan]) -> Tensor:
        """Logits of this group's step; every group brings as many tokens to the experts as the largest."""
        mine = plans[self.ranks.group]
        most = max(sum(n for _, n in plan) for plan in plans)
        single = self.graphs is not None and all(n <= self.graphs.queries for plan in plans for _, n in plan)
        size = self.graphs.size(most) if single and self.graphs is not None else None
        tokens = sum(n for _, n in mine)
        step = self._batch(mine, max(most, 1), (size or max(tokens, 1)) - tokens)
        if size is not None and self.graphs is not None:
            return self.graphs.replay(step)
        return self.model.forward(step, self.cache)

    def _batch(self, plan: Plan, rows: int, padding: int) -> Batch:
        """This group's step, with the tokens that only the device knows filled in."""
        work: list[tuple[Sequence, list[int]]] = []
        sources: list[int | None] = []
        last: list[int] = []
        at = 0
        for a, n in plan:
            ids = a.tokens[a.sequence.length : a.sequence.length + n]
            sources += [-1] * len(ids) + [a.slot] * (n - len(ids))
            work.append((a.sequence, ids + [0] * (n - len(ids))))
            last += range(at, at + n) if a.request.scored else [at + n - 1]
            at += n
        step = batch(self.cache, work, last, padding, rows)
        if all(s == -1 for s in sources):
            return step
        source = upload(np.array(sources + [-1] * padding, np.int64), self.cache.rows.device)
        return replace(step, ids=torch.where(source < 0, step.ids, self.sampler.last[source.clamp(min=0)]))

    def _sent(self, found: Tensor, entries: tuple[tuple[Entry, ...], ...]) -> Flight:
        """Results of all groups on their way to the host."""
        most = max(sum(len(e.rows) for e in group) for group in entries)
        found = self.ranks.gather(found, most).view(self.ranks.groups, most, -1)
        if found.device.type != "cuda":
            return Flight(entries=entries, results=found, landed=None)
        results = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        results.copy_(found, non_blocking=True)
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record()
        return Flight(entries=entries, results=results, landed=landed)

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


def _entries(plan: Plan) -> list[Entry]:
    """What each request of a plan will give."""
    out: list[Entry] = []
    first = 0
    for a, n in plan:
        start, end = a.sequence.length, a.sequence.length + n
        sampled = n == a.todo
        after = range(start + 1 if a.request.scored else end, end + 1)
        rows = tuple(_row(a, position, sampled and position == end) for position in after)
        out.append(Entry(active=a, length=end, sampled=sampled, first=first, rows=rows))
        first += len(rows)
    return out


def _row(a: Active, position: int, sampled: bool) -> Row:
    """The row of logits for the token at `position`."""
    if sampled:
        return Row(sampling=a.request.sampling, seed=a.seed, position=position, slot=a.slot)
    target = a.request.prompt[position] if a.request.scored and position < len(a.request.prompt) else None
    sampling = Sampling(logprobs=a.request.sampling.logprobs or 0) if target is not None else Sampling()
    return Row(sampling=sampling, seed=0, position=position, slot=None, target=target)


def _logprob(result: list[float], row: Row) -> Logprob | None:
    wanted = row.sampling.logprobs
    if wanted is None:
        return None
    tops = (len(result) - FIXED) // 2
    pairs = zip(map(int, result[FIXED : FIXED + tops]), result[FIXED + tops :], strict=True)
    token = int(result[0]) if row.target is None else row.target
    return Logprob(token=token, logprob=result[2], top=tuple(pairs)[:wanted])
