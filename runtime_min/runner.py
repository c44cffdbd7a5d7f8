"""One step on the device: from a plan to logits, tokens, and results on their way to the host."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime_min.embeddings import Embeddings, seen
from runtime_min.graphs import Graphs
from runtime_min.kv import FEW_QUERIES, Batch, LatentCache, batch, upload
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Sequence
from runtime_min.ranks import Ranks
from runtime_min.sample import Sampling
from runtime_min.sampler import Nodes, Row, Sampler
from runtime_min.scheduler import Active
from runtime_min.speculate.draft import Proposal, chain
from runtime_min.speculate.drafting import Drafting

Plan = list[tuple[Active, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One request in a launched step: cached tokens after it, whether a token was sampled, its rows of results.
    drafted: tokens to verify; then `length` counts up to the token before them, and a row is behind it and each of
    them."""

    active: Active
    length: int
    sampled: bool
    first: int
    rows: tuple[Row, ...]
    drafted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A launched step. entries: of every group; results [groups, rows, columns] float64, on the host when `landed`.
    marks: when a step with drafts began, had its drafts, and was done."""

    entries: list[list[Entry]]
    results: Tensor
    landed: Any
    marks: tuple[Any, ...] = ()

    def read(self) -> list[list[list[float]]]:
        if self.landed is not None:
            self.landed.synchronize()
        out: list[list[list[float]]] = self.results.tolist()
        return out

    def times(self) -> tuple[float, float]:
        """Milliseconds of drafting and of the rest, once it was read."""
        a, b, c = self.marks
        if self.landed is not None:
            return a.elapsed_time(b), b.elapsed_time(c)
        return 1e3 * (b - a), 1e3 * (c - b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """The tensors of this rank, which belongs to one group, and the steps that run over them. graphs: of decode steps;
    verify: of steps that verify drafts or leave what these need."""

    model: Decoder
    cache: LatentCache
    sampler: Sampler
    graphs: Graphs | None
    embeddings: Embeddings | None
    drafting: Drafting | None = None
    verify: Graphs | None = None

    @property
    def ranks(self) -> Ranks:
        return self.model.ranks

    def launch(self, plans: list[Plan]) -> Flight:
        """Starts a step of all groups, whose requests move on."""
        own = self.ranks.group
        for a, _ in plans[own]:
            if a.request.sampling.penalised and not a.counted and a.slot is not None:
                n = len(a.request.prompt)
                self.sampler.admit(a.slot, a.tokens[:n], a.tokens[n:])
                a.counted = True
        marks = [self._mark()]
        proposal = None if self.drafting is None else self.drafting.begin(plans)
        marks.append(self._mark())
        entries = [_entries(plan, proposal if g == own else None, g == own) for g, plan in enumerate(plans)]
        logits, step = self._forward(plans, proposal)
        rows = [r for e in entries[own] for r in e.rows]
        tops = [r.sampling.logprobs for es in entries for e in es for r in e.rows if r.sampling.logprobs is not None]
        most = min(max(tops), self.model.dims.vocab) if tops else None
        nodes = None if proposal is None else _nodes(proposal, entries[own], step.ids[step.last])
        found = self.sampler(logits, rows, most, self.ranks.agreed, nodes)
        for group in entries:
            for e in group:
                e.active.sequence.length = e.length
                e.active.pending += e.sampled
        drafted = any(e.drafted for es in entries for e in es)
        return self._sent(found, entries, [*marks, self._mark()] if drafted else [])

    def _mark(self) -> Any:
        """Now, on the clock of the device."""
        if self.drafting is None:
            return None
        if self.cache.rows.device.type != "cuda":
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def _forward(self, plans: list[Plan], proposal: Proposal | None) -> tuple[Tensor, Batch]:
        """Logits of this group's step, and the step; every group brings as many tokens to the experts."""
        own, mine = self.ranks.group, plans[self.ranks.group]
        most = max(sum(n for _, n in plan) for plan in plans)
        taps = () if self.drafting is None else self.drafting.wanted
        graphs, size = self._graphs(plans, taps, most)
        tokens = sum(n for _, n in mine)
        pictures = None
        if self.embeddings is not None:
            spans = [[(a.request.media, a.sequence.length, a.sequence.length + n) for a, n in p] for p in plans]
            pictures = self.embeddings.placed(spans, own, self.cache.rows.device)
        step = self._batch(mine, max(most, 1), (size or max(tokens, 1)) - tokens, proposal)
        if graphs is not None and size is not None:
            logits, states = graphs.replay(step), graphs.states[size]
        else:
            logits, states = self.model.tapped(step, self.cache, pictures, taps)
        if self.drafting is not None:
            self.drafting.states = states
        return logits, step

    def _graphs(self, plans: list[Plan], taps: tuple[int, ...], most: int) -> tuple[Graphs | None, int | None]:
        """What captured this step, and for how many tokens; None if nothing did."""
        alone = all(n == 1 for plan in plans for _, n in plan) and not taps
        graphs = self.graphs if alone else self.verify
        fits = graphs is not None and all(
            n <= graphs.queries
            and (n <= FEW_QUERIES or n > a.todo)
            and not seen(a.request.media, a.sequence.length, a.sequence.length + n)
            for plan in plans
            for a, n in plan
        )
        return (graphs, graphs.size(most)) if graphs is not None and fits else (None, None)

    def _batch(self, plan: Plan, rows: int, padding: int, proposal: Proposal | None) -> Batch:
        """This group's step, with the tokens that only the device knows filled in."""
        work: list[tuple[Sequence, list[int]]] = []
        sources: list[int | None] = []
        drafted: list[int] = []
        last: list[int] = []
        at = 0
        for a, n in plan:
            ids, extra = a.tokens[a.sequence.length : a.sequence.length + n], max(0, n - a.todo)
            drafted += range(at + n - extra, at + n)
            sources += [-1] * len(ids) + ([-1] * extra if extra else [a.slot] * (n - len(ids)))
            work.append((a.sequence, ids + [0] * (n - len(ids))))
            last += range(at, at + n) if a.request.scored or extra else [at + n - 1]
            at += n
        step = batch(self.cache, work, last, padding, rows, self._parents(plan, proposal))
        device = self.cache.rows.device
        if proposal is not None:
            where = upload(np.array(drafted, np.int64), device)
            step = replace(step, ids=step.ids.index_copy(0, where, proposal.tokens))
        if all(s == -1 for s in sources):
            return step
        source = upload(np.array(sources + [-1] * padding, np.int64), device)
        return replace(step, ids=torch.where(source < 0, step.ids, self.sampler.last[source.clamp(min=0)]))

    def _parents(self, plan: Plan, proposal: Proposal | None) -> list[list[int] | None]:
        """Of the nodes of trees; beside them few tokens in a row are a tree too, so that attention runs once."""
        if self.drafting is None or not self.drafting.trees or (proposal is None and not self.drafting.wanted):
            return []
        given = iter(() if proposal is None else proposal.parents)
        return [next(given) if n > a.todo else chain(n - 1) if n <= FEW_QUERIES else None for a, n in plan]

    def _sent(self, found: Tensor, entries: list[list[Entry]], marks: list[Any]) -> Flight:
        """Results of all groups on their way to the host."""
        most = max(sum(len(e.rows) for e in group) for group in entries)
        found = self.ranks.brought(found, most).view(self.ranks.groups, most, -1)
        if found.device.type != "cuda":
            return Flight(entries=entries, results=found, landed=None, marks=tuple(marks))
        results = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        results.copy_(found, non_blocking=True)
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record()
        return Flight(entries=entries, results=results, landed=landed, marks=tuple(marks))


def _entries(plan: Plan, proposal: Proposal | None, own: bool) -> list[Entry]:
    """What each request of a plan will give. own: this rank's group samples it; proposal: its drafts."""
    out: list[Entry] = []
    trees = iter(() if proposal is None else _trees(plan, proposal))
    first = 0
    for a, n in plan:
        start, end, drafted = a.sequence.length, a.sequence.length + n, max(0, n - a.todo)
        sampled = n >= a.todo
        if drafted:
            end = start + 1
            rows = tuple(_behind(a, first, *next(trees))) if own else (_row(a, end, True, False),) * n
        else:
            after = range(start + 1 if a.request.scored else end, end + 1)
            rows = tuple(_row(a, position, sampled and position == end, own) for position in after)
        out.append(Entry(active=a, length=end, sampled=sampled, first=first, rows=rows, drafted=drafted))
        first += len(rows)
    return out


def _row(a: Active, position: int, sampled: bool, own: bool) -> Row:
    """The row of logits for the token at `position`."""
    if sampled:
        limited = own and a.constraint is not None
        mask = a.constraint.mask(a.tokens[len(a.request.prompt) :]) if limited else None
        return Row(sampling=a.request.sampling, seed=a.seed, position=position, slot=a.slot, mask=mask)
    target = a.request.prompt[position] if a.request.scored and position < len(a.request.prompt) else None
    sampling = Sampling(logprobs=a.request.sampling.logprobs or 0) if target is not None else Sampling()
    return Row(sampling=sampling, seed=0, position=position, slot=None, target=target)


def _trees(plan: Plan, proposal: Proposal) -> Iterator[tuple[list[int], list[int]]]:
    """Parents of the nodes of each request with drafts, and their tokens if the host must know them."""
    named = any(a.constraint is not None for a, n in plan if n > a.todo)
    tokens = proposal.tokens.tolist() if named else []
    at = 0
    for parents in proposal.parents:
        yield parents, tokens[at : at + len(parents) - 1]
        at += len(parents) - 1


def _behind(a: Active, first: int, parents: list[int], tokens: list[int]) -> Iterator[Row]:
    """The rows behind root and nodes, of which the first is the step's row `first`."""
    output, paths = a.tokens[len(a.request.prompt) :], [list[int]()]
    for parent in parents[1:]:
        paths.append([*paths[parent], len(paths)])
    for path in paths:
        mask = None if a.constraint is None else a.constraint.behind(output, [tokens[node - 1] for node in path])
        yield Row(
            sampling=a.request.sampling, seed=a.seed, position=len(a.tokens) + len(path), slot=a.slot, mask=mask,
            behind=tuple(first + node for node in path),
        )  # fmt: skip


def _nodes(proposal: Proposal, entries: list[Entry], tokens: Tensor) -> Nodes:
    """What the sampler needs of a step whose rows stand behind `tokens`."""
    drafted = [e for e in entries if e.drafted]
    parents = np.zeros(sum(len(e.rows) for e in entries), np.int64)
    for e, given in zip(drafted, proposal.parents, strict=True):
        parents[e.first : e.first + len(e.rows)] = given
    drawn = []
    for level, scores in enumerate(proposal.scores):
        here = [e for e in drafted if e.drafted > level]
        judged = [i for i, e in enumerate(here) if e.active.request.sampling.temperature > 0]
        if judged:
            at = upload(np.array(judged, np.int64), tokens.device)
            drawn.append(([here[i].first + level for i in judged], scores[at]))
    return Nodes(tokens=tokens, parents=upload(parents, tokens.device), drawn=drawn)
