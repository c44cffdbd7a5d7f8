"""What sampling keeps on the device between steps, and one step's sampling of all rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime_min.kv import upload
from runtime_min.sample import DRAFT, Rows, Sampling, draw, penalised, probabilities
from runtime_min.speculate.verify import judged

# A row of results: the token, whether all logits were finite, the log-probability, the node of a draft that the row
# stands behind: its token and its parent, then the likeliest ids and theirs.
FIXED = 5
# Rows whose tokens are drawn at once.
DRAWN = 128
# From the logits of drafts [n, V], the rows of their tokens and the tokens before them to their tokens [n].
Guess = Callable[[Tensor, "list[Row]", Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of logits: those of the token at `position`. slot: where the request's last token is kept, None if this
    row's token is not the request's next. target: the known next token whose log-probability is wanted instead. mask:
    int32 words on the host, whose bits say which tokens are allowed; None for all. behind: None, or the drafted tokens
    after the request's own that this row stands behind, by their places among the nodes; nothing is kept of such a row
    until its request's run is known."""

    sampling: Sampling
    seed: int
    position: int
    slot: int | None
    target: int | None = None
    mask: Tensor | None = None
    behind: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """What drafts put into a step. tokens, parents [n] int64 of every row. drawn: chains to judge, for each place in
    them: rows that stand before it, and the logits [m, V] that the next token of each was drawn from."""

    tokens: Tensor
    parents: Tensor
    drawn: list[tuple[list[int], Tensor]]


class Sampler:
    """last [slots + 1] int64: the newest token of every running request; the last slot is for what nobody keeps."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.nowhere = slots
        self.last = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.counts = torch.zeros((slots + 1, vocab), dtype=torch.int32, device=device)
        self.seen = torch.zeros((slots + 1, vocab), dtype=torch.bool, device=device)

    @staticmethod
    def nbytes(slots: int, vocab: int) -> int:
        return (slots + 1) * (vocab * 5 + 8)

    def admit(self, slot: int, prompt: list[int], output: list[int]) -> None:
        """The counts that penalties of a request in this slot begin with."""
        device = self.last.device
        self.counts[slot], self.seen[slot] = 0, False
        self.seen[slot].index_fill_(0, upload(np.array(prompt + output, np.int64), device), True)
        if output:
            ids = upload(np.array(output, np.int64), device)
            self.counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def count(self, slot: int, output: list[int]) -> None:
        """Counts tokens of a run that was accepted."""
        ids = upload(np.array(output, np.int64), self.last.device)
        self.counts[slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.seen[slot].index_fill_(0, ids, True)

    @torch.inference_mode()
    def __call__(
        self,
        logits: Tensor,
        rows: list[Row],
        tops: int | None,
        agreed: Callable[[Tensor], Tensor],
        nodes: Nodes | None = None,
    ) -> Tensor:
        """logits [n, V] -> results [n, 5 + 2 tops] float64, as `agreed` among ranks; `last` and the counts move on.

        tops None: no log-probabilities at all.
        """
        device = logits.device
        if not rows:
            return torch.zeros((0, FIXED + 2 * (tops or 0)), dtype=torch.float64, device=device)
        raw = logits if logits.dtype == torch.float64 else logits.float()
        finite = raw.isfinite().all(-1)
        raw = torch.where(finite[:, None], raw, 0.0)
        biased = self.biased(raw, rows, None if nodes is None else nodes.tokens)
        # Greedy rows take the first of equal maxima.
        tokens = biased.argmax(-1)
        known = {row for level, _ in nodes.drawn for row in level} if nodes is not None else set()
        drawn = [i for i, r in enumerate(rows) if r.sampling.temperature > 0 and i not in known]
        # Few at a time, for filters sort whole vocabularies in float64.
        for i in range(0, len(drawn), DRAWN):
            at, how = _rows(rows, drawn[i : i + DRAWN], device)
            tokens = tokens.index_copy(0, at, draw(biased[at], how))
        if nodes is not None:
            tokens = _judged(tokens, biased, rows, nodes)
        targets = upload(np.array([-1 if r.target is None else r.target for r in rows], np.int64), device)
        told = torch.where(targets >= 0, targets, tokens)
        found = agreed(_results(raw, tokens, finite, told, tops, nodes))
        tokens = found[:, 0].long()
        slots = self._slots([None if r.behind is not None else r.slot for r in rows])
        self.last.index_copy_(0, slots, tokens)
        if any(r.sampling.penalised and r.slot is not None for r in rows):
            self.counts.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
            self.seen.index_put_((slots, tokens), torch.ones_like(finite))
        return found

    @torch.inference_mode()
    def guess(self, logits: Tensor, rows: list[Row], before: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [n] for a draft's logits [n, V], chosen as the rows' requests choose theirs but by random numbers of
        their own; and the logits that they were chosen from. before: the drafted tokens that `behind` counts."""
        raw = logits if logits.dtype == torch.float64 else logits.float()
        # What a draft lacks is -inf. Anything else that is not finite only makes a bad guess.
        raw = self.biased(torch.where(raw.isnan() | (raw == torch.inf), 0.0, raw), rows, before)
        tokens = raw.argmax(-1)
        drawn = [i for i, r in enumerate(rows) if r.sampling.temperature > 0]
        if drawn:
            at, how = _rows(rows, drawn, raw.device)
            tokens = tokens.index_copy(0, at, draw(raw[at], how, DRAFT))
        return tokens, raw

    def _slots(self, slots: list[int | None]) -> Tensor:
        return upload(np.array([self.nowhere if s is None else s for s in slots], np.int64), self.last.device)

    def biased(self, raw: Tensor, rows: list[Row], nodes: Tensor | None) -> Tensor:
        """Logits after penalties, biases and masks. nodes: the tokens that rows stand behind."""
        device = raw.device
        if any(r.sampling.penalised and r.slot is not None for r in rows):
            weights = [(r.sampling.presence, r.sampling.frequency, r.sampling.repetition) for r in rows]
            slots = self._slots([r.slot for r in rows])
            counts, seen = self.counts[slots], self.seen[slots]
            pairs = [(i, place) for i, r in enumerate(rows) if r.sampling.penalised for place in r.behind or ()]
            if pairs and nodes is not None:
                at, place = upload(np.array(pairs, np.int64).T.copy(), device).unbind(0)
                counts.index_put_((at, nodes[place]), torch.ones_like(at, dtype=torch.int32), accumulate=True)
                seen.index_put_((at, nodes[place]), torch.ones_like(at, dtype=torch.bool))
            raw = penalised(raw, counts, seen, upload(np.array(weights), device))
        entries = [(i, token, value) for i, r in enumerate(rows) for token, value in r.sampling.bias]
        if entries:
            at, token, value = (upload(np.array(v), device) for v in zip(*entries, strict=True))
            raw = raw.index_put((at, token), value.to(raw.dtype), accumulate=True)
        masks = {i: r.mask for i, r in enumerate(rows) if r.mask is not None}
        if masks:
            where = upload(np.array(list(masks), np.int64), device)
            allowed = _bits(torch.stack(list(masks.values())).to(device))[:, : raw.shape[1]]
            raw = raw.index_copy(0, where, raw[where].masked_fill(~allowed, -torch.inf))
        return raw


def _bits(words: Tensor) -> Tensor:
    """int32 [n, words] -> bool [n, 32 words], the lowest bit first."""
    return ((words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1).bool().flatten(1)


def _judged(tokens: Tensor, biased: Tensor, rows: list[Row], nodes: Nodes) -> Tensor:
    """The choices of the rows in front of drawn tokens, place by place, so that few distributions exist at once."""
    for level, scores in nodes.drawn:
        at, how = _rows(rows, level, tokens.device)
        p, q = probabilities(biased[at], how), probabilities(scores, how)
        chosen = judged(p, q, nodes.tokens[at + 1], how.seeds, how.positions)
        tokens = tokens.index_copy(0, at, chosen)
    return tokens


def _results(
    raw: Tensor, tokens: Tensor, finite: Tensor, told: Tensor, tops: int | None, nodes: Nodes | None
) -> Tensor:
    """Results of n rows; the log-probabilities are of the ids `told`."""
    none = torch.zeros_like(tokens)
    bear, parents = (none, none) if nodes is None else (nodes.tokens, nodes.parents)
    if tops is None:
        return torch.stack([tokens, finite, none, bear, parents], -1).double()
    normed = raw.log_softmax(-1)
    top, found = normed.topk(tops, -1), normed.gather(-1, told[:, None])[:, 0]
    parts = [t.double() for t in (tokens, finite, found, bear, parents)]
    return torch.cat([torch.stack(parts, -1), top.indices.double(), top.values.double()], -1)


def _rows(rows: list[Row], places: list[int], device: torch.device) -> tuple[Tensor, Rows]:
    """The rows at these places, which draw at random; and the places."""
    some = [rows[i] for i in places]
    knobs = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p, r.sampling.min_p) for r in some]
    whole = np.array([places, [r.seed for r in some], [r.position for r in some]], np.int64)
    at, seeds, positions = upload(whole, device).unbind(0)
    return at, Rows(
        seeds=seeds,
        positions=positions,
        knobs=upload(np.array(knobs, np.float64), device),
        filtered=any(r.sampling.top_k or r.sampling.top_p < 1 for r in some),
    )
