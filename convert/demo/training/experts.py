"""Routed experts over all tokens of a batch at once: each expert has a fixed number of places, so shapes never change.

Tokens go to their places and come back by gathers in both directions; nothing is added atomically, so sums repeat.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

ALIGN = 64


class Places(NamedTuple):
    """slot [N, k]: the place of each choice, the one past the last for a choice that found its expert full.

    source [places]: which choice (token * k + rank) a place holds, N * k for none. loads [E]: choices of each expert.
    """

    slot: Tensor
    source: Tensor
    loads: Tensor


def places(ids: Tensor, experts: int, capacity: int) -> Places:
    """Where the choices ids [N, k] go; earlier tokens first."""
    flat = ids.flatten()
    chosen, order = flat.sort(stable=True)
    loads = (flat[:, None] == torch.arange(experts, device=ids.device)).sum(0)
    at = torch.arange(len(flat), device=ids.device) - (loads.cumsum(0) - loads)[chosen]
    slot = torch.where(at < capacity, chosen * capacity + at, experts * capacity)
    source = torch.full((experts * capacity + 1,), len(flat), device=ids.device)
    source[slot] = order
    return Places(torch.empty_like(slot).scatter_(0, order, slot).view_as(ids), source[:-1], loads)


def _padded(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


class _Sent(torch.autograd.Function):
    """x [N, H] -> [places, H]; an empty place holds zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return _padded(x)[source // slot.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return _padded(grads[0])[slot].sum(1), None, None


class _Returned(torch.autograd.Function):
    """y [places, H], weights [N, k] fp32 -> the weighted sums [N, H] fp32."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, slot: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, slot, source)
        return (_padded(y)[slot].float() * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weights, slot, source = ctx.saved_tensors
        grad = grads[0]
        of_weights = (_padded(y)[slot].float() * grad[:, None]).sum(-1)
        factor = _padded(weights.flatten())[source]
        of_y = _padded(grad.to(y.dtype))[source // slot.shape[1]] * factor[:, None].to(y.dtype)
        return of_y, of_weights, None, None


def capacity(tokens: int, top_k: int, experts: int, factor: float | None) -> int:
    """Places of one expert: `factor` times an even share; None for as many as there are tokens."""
    if factor is None:
        return tokens
    return min(tokens, -(-int(tokens * top_k / experts * factor) // ALIGN) * ALIGN)


class Routed(NamedTuple):
    out: Tensor
    loads: Tensor
    lost: Tensor


def routed(
    x: Tensor, scores: Tensor, bias: Tensor, weights: tuple[Tensor, Tensor, Tensor], top_k: int, scale: float,
    factor: float | None,
) -> Routed:  # fmt: skip
    """Sum of the top_k experts of every token, as the checkpoint's router has it.

    x [N, H], scores [N, E] fp32 (sigmoids), bias [E] fp32, weights gate and up [E, F, H], down [E, H, F]. lost: the
    share of choices that found their expert full.
    """
    gate, up, down = weights
    experts = len(gate)
    ids = (scores.detach() + bias).topk(top_k, -1).indices
    chosen = scores.gather(1, ids)
    chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale
    room = capacity(len(x), top_k, experts, factor)
    slot, source, loads = places(ids, experts, room)
    sent = _Sent.apply(x, slot, source).view(experts, room, -1)  # type: ignore[no-untyped-call]
    inner = silu(sent @ gate.mT) * (sent @ up.mT)
    y = (inner @ down.mT).flatten(0, 1)
    out: Tensor = _Returned.apply(y, chosen, slot, source)  # type: ignore[no-untyped-call]
    lost = (loads - room).clamp_min(0).sum() / slot.numel()
    return Routed(out, loads, lost)
