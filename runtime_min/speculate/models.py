"""EAGLE3 and DFlash behind the one protocol."""

from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime_min.drafts import DFlash, Eagle3
from runtime_min.kv import LatentCache, Tree, batch, upload
from runtime_min.models.decoder import Decoder
from runtime_min.pages import NULL_PAGE, Sequence
from runtime_min.request import MOST_DRAFTS, WIDTH
from runtime_min.sampler import Guess, Row
from runtime_min.speculate.draft import Asked, Draft, Fed, Proposal, chain
from runtime_min.speculate.trees import LEAST, Candidates, best_first, likeliest
from runtime_min.warm import warm_draft


def draft_of(model: Eagle3 | DFlash, target: Decoder) -> Draft:
    return EagleDraft(model, target) if isinstance(model, Eagle3) else BlockDraft(model, target)


class EagleDraft:
    """One token a pass, each from the draft's own state of the one before.

    Its guesses lie in its cache behind what stands; they are overwritten when it is fed what became of them.
    """

    ahead, longest, usual = 1, MOST_DRAFTS, 3

    def __init__(self, model: Eagle3, target: Decoder) -> None:
        self.model, self.target, self.taps = model, target, model.taps
        self.cached = model.dims.layers * model.width * target.embed.element_size()
        self.state = self.out = target.embed.new_zeros(0, target.dims.hidden)

    def bind(self, cache: LatentCache) -> None:
        self.cache, self.rows = cache, self.model.cache(cache)

    def warm(self, step_tokens: int) -> None:
        warm_draft(self.model, step_tokens)

    def extend(self, fed: Fed) -> None:
        assert fed.embeds is not None and fed.states is not None
        state, out = self.model.first(fed.embeds, fed.states, fed.batch, self.rows)
        self.state, self.out = state[fed.batch.last], out[fed.batch.last]

    def propose(self, asked: Several[Asked], guess: Guess) -> Proposal:
        device = self.cache.rows.device
        grid = torch.zeros((len(asked), max(a.count for a in asked)), dtype=torch.int64, device=device)
        scores, here = [], list(range(len(asked)))
        at = _places(asked, device)
        state, out = self.state[at], self.out[at]
        for level in range(grid.shape[1]):
            if level:
                going = [place for place, i in enumerate(here) if asked[i].count > level]
                here = [here[place] for place in going]
                row = upload(np.array(here, np.int64), device)
                work = [(_behind(asked[i], level - 1), [0]) for i in here]
                before = self.target.embedded(grid[row, level - 1])
                state = state[upload(np.array(going, np.int64), device)]
                state, out = self.model.next(before, state, batch(self.cache, work), self.rows)
            row = upload(np.array(here, np.int64), device)
            rows = [_row(asked[i], level, range(i * grid.shape[1], i * grid.shape[1] + level)) for i in here]
            grid[row, level], score = guess(self.model.logits(out), rows, grid.flatten())
            scores.append(score)
        return _chains(asked, grid, scores)

    def grow(self, asked: Several[Asked]) -> Proposal:
        """Level by level: the likeliest nodes of a level, as many as there is room for, have WIDTH children each."""
        trees: dict[int, tuple[list[int], list[int]]] = {}
        sizes = [(a.count, min(a.depth, a.count)) for a in asked]
        for count, depth in sorted(set(sizes)):
            places = [i for i, size in enumerate(sizes) if size == (count, depth)]
            found = self._candidates([asked[i] for i in places], count, depth)
            trees |= dict(zip(places, likeliest(found, count, self.target.ranks), strict=True))
        return _trees([trees[i] for i in range(len(asked))], self.cache.rows.device)

    def _candidates(self, asked: Several[Asked], count: int, depth: int) -> list[Candidates]:
        """All nodes that were looked at, level by level, for requests alike in what they want."""
        beam = max(1, min(WIDTH, (count + 1) // max(1, depth - 1)))
        at = _places(asked, self.cache.rows.device)
        state, out = self.state[at][:, None], self.out[at]
        levels = [Candidates.of(self._guessed(out, (len(asked), 1)), None)]
        visible: Tensor | None = None
        for level in range(depth - 1):
            ids, parent, places = levels[-1].best(beam)
            width = ids.shape[1]
            # The first level's parents all are the root, of which there is one state.
            state = state.gather(1, parent[..., None].expand(-1, -1, state.shape[-1]))
            own = 1 << torch.arange(level * beam, level * beam + width, device=ids.device)
            visible = own.expand_as(ids) if visible is None else own | visible.gather(1, parent)
            step = self._step(asked, level, beam, width, visible)
            flat, out = self.model.next(self.target.embedded(ids.flatten()), state.flatten(0, 1), step, self.rows)
            state = flat.view_as(state)
            levels.append(Candidates.of(self._guessed(out, ids.shape), (levels[-1], places)))
        return levels

    def _guessed(self, out: Tensor, shape: Several[int]) -> Tensor:
        """out [product of shape, hidden] -> logits [*shape, vocab]."""
        return self.model.logits(out).view(*shape, -1)

    def _step(self, asked: Several[Asked], level: int, beam: int, width: int, visible: Tensor) -> Any:
        """`width` nodes of this level for every request, behind those of the levels before."""
        work = [(_behind(a, level * beam), [0] * width) for a in asked]
        step = batch(self.cache, work, parents=[[-1] * width] * len(asked))
        device = visible.device
        prefix = np.array([a.active.sequence.length for a in asked])
        (part,) = step.parts
        tree = Tree(upload(prefix.astype(np.int32), device), visible.flatten())
        positions = upload((prefix + level).repeat(width), device)
        return replace(step, positions=positions, parts=(replace(part, tree=tree),))


class BlockDraft:
    """All tokens in one pass, none of which knows the others; only the context is kept in the cache."""

    ahead = 0

    def __init__(self, model: DFlash, target: Decoder) -> None:
        self.model, self.target, self.taps = model, target, model.taps
        self.longest = self.usual = min(MOST_DRAFTS, model.block - 1)
        self.cached = model.dims.layers * model.width * target.embed.element_size()

    def bind(self, cache: LatentCache) -> None:
        self.cache, self.rows = cache, self.model.cache(cache)

    def warm(self, step_tokens: int) -> None:
        warm_draft(self.model, step_tokens)

    def extend(self, fed: Fed) -> None:
        assert fed.states is not None
        self.model.context(fed.states, fed.batch, self.rows)

    def propose(self, asked: Several[Asked], guess: Guess) -> Proposal:
        logits, scores = self._logits(asked), []
        grid = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
        for level in range(max(a.count for a in asked)):
            here = [i for i, a in enumerate(asked) if a.count > level]
            row = upload(np.array(here, np.int64), logits.device)
            rows = [_row(asked[i], level, range(i * grid.shape[1], i * grid.shape[1] + level)) for i in here]
            grid[row, level], score = guess(logits[row, level], rows, grid.flatten())
            scores.append(score)
        return _chains(asked, grid, scores)

    def grow(self, asked: Several[Asked]) -> Proposal:
        """Best first over products of the block's marginals."""
        logits = self._logits(asked)
        top = logits.double().nan_to_num(neginf=-torch.inf).log_softmax(-1).topk(min(WIDTH, logits.shape[-1]))
        told = self.target.ranks.agreed(torch.stack([top.values.clamp(min=LEAST), top.indices.double()])).tolist()
        trees = [
            best_first(values[: a.depth], ids[: a.depth], a.count)
            for a, values, ids in zip(asked, *told, strict=True)
        ]  # fmt: skip
        return _trees(trees, logits.device)

    def _logits(self, asked: Several[Asked]) -> Tensor:
        """[n, block - 1, vocab] of the tokens after each request's newest."""
        block, size = self.model.block, self.cache.page_tokens
        work = []
        for a in asked:
            sequence = _behind(a, 0)
            # Nothing of the block is kept, so that it needs no pages.
            sequence.pages += [NULL_PAGE] * max(0, -(-(sequence.length + block) // size) - len(sequence.pages))
            work.append((sequence, [a.active.tokens[-1], *[self.model.mask_id] * (block - 1)]))
        step = batch(self.cache, work)
        step = replace(step, slots=torch.full_like(step.slots, -1))
        return self.model.block_logits(self.target.embedded(step.ids), step, self.rows)


def _behind(asked: Asked, tokens: int) -> Sequence:
    """A request's cache with so many tokens on top of what stands."""
    sequence = asked.active.sequence
    return Sequence(list(sequence.pages), sequence.length + tokens)


def _places(asked: Several[Asked], device: torch.device) -> Tensor:
    return upload(np.array([a.place for a in asked], np.int64), device)


def _row(asked: Asked, level: int, behind: Several[int]) -> Row:
    """The row of logits for the drafted token at a level, 0 for the first."""
    a = asked.active
    return Row(
        sampling=a.request.sampling, seed=a.seed, position=len(a.tokens) + level, slot=a.slot, behind=tuple(behind)
    )


def _chains(asked: Several[Asked], grid: Tensor, scores: list[Tensor]) -> Proposal:
    """Scores are kept where somebody draws."""
    width = grid.shape[1]
    flat = np.array([i * width + level for i, a in enumerate(asked) for level in range(a.count)], np.int64)
    drawn = any(a.active.request.sampling.temperature > 0 for a in asked)
    return Proposal(
        tokens=grid.flatten()[upload(flat, grid.device)],
        parents=[chain(a.count) for a in asked],
        scores=scores if drawn else [],
    )


def _trees(trees: Several[tuple[list[int], list[int]]], device: torch.device) -> Proposal:
    """trees: tokens of the nodes and parents of root and nodes, for each request."""
    tokens = np.array([token for ids, _ in trees for token in ids], np.int64)
    return Proposal(tokens=upload(tokens, device), parents=[parents for _, parents in trees], scores=[])
