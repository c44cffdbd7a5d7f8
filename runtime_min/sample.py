"""From logits to the next token."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy. top_p keeps the fewest tokens with at least that mass; top_k that many, 0 all."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


def probabilities(logits: Tensor, s: Sampling) -> Tensor:
    """logits [n, V] -> probabilities [n, V] float64 after temperature, top-k, then top-p over what is left."""
    scaled = logits.double() / s.temperature
    if 0 < s.top_k < logits.shape[-1]:
        floor = scaled.topk(s.top_k, -1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < floor, float("-inf"))
    p = scaled.softmax(-1)
    if s.top_p < 1.0:
        ordered, order = torch.sort(p, dim=-1, descending=True, stable=True)
        # A token stays if the mass before it has not reached top_p: the most likely one always does.
        keep = (ordered.cumsum(-1) - ordered) < s.top_p
        p = torch.zeros_like(p).scatter(-1, order, ordered * keep)
        p = p / p.sum(-1, keepdim=True)
    return p


def sample(logits: Tensor, s: Sampling, generator: torch.Generator) -> Tensor:
    """logits [n, V] -> token ids [n] int64. The first of equal maxima wins; draws come from `generator` alone."""
    if s.temperature == 0:
        return logits.argmax(-1)
    p = probabilities(logits, s)
    u = torch.rand((p.shape[0], 1), generator=generator, dtype=torch.float64, device=generator.device).to(p.device)
    drawn = torch.searchsorted(p.cumsum(-1), u * p.sum(-1, keepdim=True), right=True).squeeze(-1)
    return drawn.clamp(max=p.shape[-1] - 1)
