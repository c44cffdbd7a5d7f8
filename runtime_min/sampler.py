"""What sampling keeps on the device between steps, and one step's sampling of all rows."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime_min.kv import upload
from runtime_min.sample import Rows, Sampling, draw, penalised

# A row of results: the token, whether all logits were finite, the log-probability, then the likeliest ids and theirs.
FIXED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of logits: those of the token at `position`. slot: where the request's last token is kept, None if this
    row's token is not the request's next. target: the known next token whose log-probability is wanted instead. mask:
    int32 words on the host, whose bits say which tokens are allowed; None for all."""

    sampling: Sampling
    seed: int
    position: int
    slot: int | None
    target: int | None = None
    mask: Tensor | None = None


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

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: list[Row], tops: int | None, agreed: Callable[[Tensor], Tensor]) -> Tensor:
        """logits [n, V] -> results [n, 3 + 2 tops] float64, as `agreed` among ranks; `last` and the counts move on.

        tops None: no log-probabilities at all.
        """
        device = logits.device
        if not rows:
            return torch.zeros((0, FIXED + 2 * (tops or 0)), dtype=torch.float64, device=device)
        raw = logits if logits.dtype == torch.float64 else logits.float()
        finite = raw.isfinite().all(-1)
        raw = torch.where(finite[:, None], raw, 0.0)
        whole = np.array(
            [
                (r.seed, r.position, self.nowhere if r.slot is None else r.slot, -1 if r.target is None else r.target)
                for r in rows
            ],
            np.int64,
        )
        seeds, positions, slots, targets = upload(np.ascontiguousarray(whole.T), device).unbind(0)
        biased = self._biased(raw, rows, slots)
        # Greedy rows take the first of equal maxima.
        tokens = biased.argmax(-1)
        drawn = [i for i, r in enumerate(rows) if r.sampling.temperature > 0]
        if drawn:
            at = upload(np.array(drawn, np.int64), device)
            picked = draw(biased[at], _rows([rows[i] for i in drawn], seeds[at], positions[at], device))
            tokens = tokens.index_copy(0, at, picked)
        told = torch.where(targets >= 0, targets, tokens)
        found = agreed(_results(raw, tokens, finite, told, tops))
        tokens = found[:, 0].long()
        self.last.index_copy_(0, slots, tokens)
        if any(r.sampling.penalised and r.slot is not None for r in rows):
            self.counts.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)
            self.seen.index_put_((slots, tokens), torch.ones_like(finite))
        return found

    def _biased(self, raw: Tensor, rows: list[Row], slots: Tensor) -> Tensor:
        """Logits after penalties, biases and masks."""
        device = raw.device
        if any(r.sampling.penalised and r.slot is not None for r in rows):
            weights = [(r.sampling.presence, r.sampling.frequency, r.sampling.repetition) for r in rows]
            raw = penalised(raw, self.counts[slots], self.seen[slots], upload(np.array(weights), device))
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


def _results(raw: Tensor, tokens: Tensor, finite: Tensor, told: Tensor, tops: int | None) -> Tensor:
    """Results of n rows; the log-probabilities are of the ids `told`."""
    parts = [tokens.double(), finite.double()]
    if tops is None:
        return torch.stack([*parts, torch.zeros_like(parts[0])], -1)
    normed = raw.log_softmax(-1)
    top = normed.topk(tops, -1)
    parts.append(normed.gather(-1, told[:, None])[:, 0].double())
    return torch.cat([torch.stack(parts, -1), top.indices.double(), top.values.double()], -1)


def _rows(rows: list[Row], seeds: Tensor, positions: Tensor, device: torch.device) -> Rows:
    knobs = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p, r.sampling.min_p) for r in rows]
    return Rows(
        seeds=seeds,
        positions=positions,
        knobs=upload(np.array(knobs, np.float64), device),
        filtered=any(r.sampling.top_k or r.sampling.top_p < 1 for r in rows),
    )
