"""Drafts at work beside one rank's steps: fed what stands before each step, asked for what the step will verify.

What a step leaves, the target's states of its tokens, is fed at the beginning of the next one, when the token after
each is known. So pages that the draft shares with the target are filled for both, one step apart.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from runtime_min.embeddings import Embeddings
from runtime_min.kv import LatentCache, batch, upload
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Sequence
from runtime_min.sampler import Sampler
from runtime_min.scheduler import Active
from runtime_min.speculate.draft import Asked, Draft, Fed, Proposal

Plan = Several[tuple[Active, int]]


@dataclass(slots=True, kw_only=True)
class Drafting:
    """One rank's draft. trees: does it propose trees; depth: most tokens in a row.

    states: of the tokens of the step before. fed: who has some of them, by group; rows: which, for the own group.
    """

    draft: Draft
    model: Decoder
    cache: LatentCache
    sampler: Sampler
    embeddings: Embeddings | None
    trees: bool
    depth: int
    states: Tensor | None = None
    fed: list[list[Active]] = field(default_factory=list)
    rows: dict[int, list[int]] = field(default_factory=dict)

    def begin(self, plans: Several[Plan]) -> Proposal | None:
        """Feeds what the step before has left and proposes for this group's next step. What this one will leave is
        then settled for all groups: states are wanted if `fed` holds anybody."""
        own = self.model.ranks.group
        tails = [
            [(a, n) for a in group if a.fed and not a.done and (n := self._standing(a) - a.extended) > 0]
            for group in self.fed
        ]
        if any(tails):
            self._extend(tails)
        places = {a: i for i, (a, _) in enumerate(tails[own])} if tails else {}
        for a, n in chain.from_iterable(tails):
            a.extended += n
        for a in chain.from_iterable(self.fed):
            a.fed = False
        proposal = self._proposed(plans[own], places)
        self.fed = [[a for a, n in plan if self._keeps(a, n)] for plan in plans]
        for a in chain.from_iterable(self.fed):
            a.fed = True
        at = 0
        self.rows = {}
        for a, n in plans[own]:
            self.rows[a.id] = list(range(at, at + n))
            at += n
        return proposal

    @property
    def wanted(self) -> tuple[int, ...]:
        """Layers whose outputs this step must keep."""
        return self.draft.taps if any(self.fed) else ()

    def accept(self, a: Active, start: int, path: list[int]) -> None:
        """What stands of the tokens after `start`: the nodes of an accepted path, whose rows in the target's cache come
        to lie one behind another."""
        rows = self.rows[a.id]
        self.rows[a.id] = [rows[i] for i in path]
        if path != list(range(len(path))):
            size, pages = self.cache.page_tokens, np.array(a.sequence.pages)
            moved = start + np.array([path, range(len(path))])
            taken, put = upload(pages[moved // size] * size + moved % size, self.cache.rows.device).unbind(0)
            self.cache.rows.index_copy_(1, put, self.cache.rows.index_select(1, taken))

    def _standing(self, a: Active) -> int:
        """Tokens that stand and whose next ones, if the draft looks ahead, are known."""
        return min(a.sequence.length, len(a.tokens) - self.draft.ahead)

    def _keeps(self, a: Active, n: int) -> bool:
        """Will the draft be fed these tokens? Of prompts always, so that others find their pages complete."""
        start = a.sequence.length
        return a.extended == start and (a.drafting or start + n <= len(a.request.prompt))

    def _extend(self, tails: Several[Several[tuple[Active, int]]]) -> None:
        ahead, device = self.draft.ahead, self.cache.rows.device
        mine = tails[self.model.ranks.group]
        pictures = None
        if self.embeddings is not None and ahead:
            spans = [[(a.request.media, a.extended + 1, a.extended + n + 1) for a, n in group] for group in tails]
            pictures = self.embeddings.placed(spans, self.model.ranks.group, device)
        if not mine:
            return
        work = [(Sequence(a.sequence.pages, a.extended), [0] * n) for a, n in mine]
        embeds = None
        if ahead:
            ids = np.array([i for a, n in mine for i in a.tokens[a.extended + 1 : a.extended + n + 1]], np.int64)
            embeds = self.model.embedded(upload(ids, device))
            if pictures is not None:
                embeds = embeds.index_copy(0, *pictures)
        states = None
        if self.states is not None:
            rows = np.array([row for a, n in mine for row in self.rows[a.id][:n]], np.int64)
            states = self.states.index_select(0, upload(rows, device))
        step = batch(self.cache, work)
        self.draft.extend(Fed(actives=[a for a, _ in mine], states=states, embeds=embeds, batch=step))

    def _proposed(self, plan: Plan, places: dict[Active, int]) -> Proposal | None:
        asked = [
            Asked(active=a, count=n - 1, depth=min(self.depth, a.left - 1), place=places[a])
            for a, n in plan
            if n > a.todo
        ]
        if not asked:
            return None
        with torch.inference_mode():
            found = self.draft.grow(asked) if self.trees else self.draft.propose(asked, self.sampler.guess)
        self.model.ranks.agreed(found.tokens)
        return found
