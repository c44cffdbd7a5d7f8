"""One step on the device: from a plan to logits, tokens, and results on their way to the host."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime_min.embeddings import Embeddings
from runtime_min.graphs import Graphs
from runtime_min.kv import Batch, LatentCache, batch, upload
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Sequence
from runtime_min.ranks import Ranks
from runtime_min.request import Media
from runtime_min.sample import Sampling
from runtime_min.sampler import Row, Sampler
from runtime_min.scheduler import Active

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

    entries: list[list[Entry]]
    results: Tensor
    landed: Any

    def read(self) -> list[list[list[float]]]:
        if self.landed is not None:
            self.landed.synchronize()
        out: list[list[list[float]]] = self.results.tolist()
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """The tensors of this rank, which belongs to one group, and the steps that run over them."""

    model: Decoder
    cache: LatentCache
    sampler: Sampler
    graphs: Graphs | None
    embeddings: Embeddings | None

    @property
    def ranks(self) -> Ranks:
        return self.model.ranks

    def launch(self, plans: list[Plan]) -> Flight:
        """Starts a step of all groups, whose requests move on."""
        entries = [_entries(plan, own=g == self.ranks.group) for g, plan in enumerate(plans)]
        for a, _ in plans[self.ranks.group]:
            if a.request.sampling.penalised and not a.counted and a.slot is not None:
                n = len(a.request.prompt)
                self.sampler.admit(a.slot, a.tokens[:n], a.tokens[n:])
                a.counted = True
        logits = self._forward(plans)
        rows = [r for e in entries[self.ranks.group] for r in e.rows]
        tops = [r.sampling.logprobs for es in entries for e in es for r in e.rows if r.sampling.logprobs is not None]
        most = min(max(tops), self.model.dims.vocab) if tops else None
        found = self.sampler(logits, rows, most, self.ranks.agreed)
        for group in entries:
            for e in group:
                e.active.sequence.length = e.length
                e.active.pending += e.sampled
        return self._sent(found, entries)

    def _forward(self, plans: list[Plan]) -> Tensor:
        """Logits of this group's step; every group brings as many tokens to the experts as the largest."""
        mine = plans[self.ranks.group]
        most = max(sum(n for _, n in plan) for plan in plans)
        size = None
        if self.graphs is not None and all(n <= self.graphs.queries and not _seen(a, n) for p in plans for a, n in p):
            size = self.graphs.size(most)
        tokens = sum(n for _, n in mine)
        pictures = self._pictures(plans)
        step = self._batch(mine, max(most, 1), (size or max(tokens, 1)) - tokens)
        if size is not None and self.graphs is not None:
            return self.graphs.replay(step)
        return self.model.forward(step, self.cache, pictures)

    def _pictures(self, plans: list[Plan]) -> tuple[Tensor, Tensor] | None:
        """Which tokens of this group's step are pictures', and their embeddings; all ranks encode those of all groups
        together."""
        if self.embeddings is None:
            return None
        self.embeddings.need(m for plan in plans for a, n in plan for m, _, _ in _seen(a, n))
        places, features, at = [], [], 0
        for a, n in plans[self.ranks.group]:
            start = a.sequence.length
            for m, low, high in _seen(a, n):
                places.append(np.arange(low, high) - start + at)
                features.append(self.embeddings.rows[m.digest][low - m.position : high - m.position])
            at += n
        if not places:
            return None
        return upload(np.concatenate(places), self.cache.rows.device), torch.cat(features)

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

    def _sent(self, found: Tensor, entries: list[list[Entry]]) -> Flight:
        """Results of all groups on their way to the host."""
        most = max(sum(len(e.rows) for e in group) for group in entries)
        found = self.ranks.brought(found, most).view(self.ranks.groups, most, -1)
        if found.device.type != "cuda":
            return Flight(entries=entries, results=found, landed=None)
        results = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        results.copy_(found, non_blocking=True)
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record()
        return Flight(entries=entries, results=results, landed=landed)


def _entries(plan: Plan, own: bool) -> list[Entry]:
    """What each request of a plan will give. own: this rank's group samples it."""
    out: list[Entry] = []
    first = 0
    for a, n in plan:
        start, end = a.sequence.length, a.sequence.length + n
        sampled = n == a.todo
        after = range(start + 1 if a.request.scored else end, end + 1)
        rows = tuple(_row(a, position, sampled and position == end, own) for position in after)
        out.append(Entry(active=a, length=end, sampled=sampled, first=first, rows=rows))
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


def _seen(a: Active, n: int) -> list[tuple[Media, int, int]]:
    """(picture, first, last position) of every picture that reaches into the next n tokens, cut to them."""
    start, end = a.sequence.length, a.sequence.length + n
    found = ((m, max(start, m.position), min(end, m.end)) for m in a.request.media)
    return [(m, low, high) for m, low, high in found if low < high]
