"""Rotary positions of query and key, the latent's RMSNorm, and the write of a token's row into the latent cache, by
definition."""

import torch
from torch import Tensor

from runtime_min.kernels.rmsnorm.ref import rmsnorm
from runtime_min.kernels.wide import wide


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[..., 2i], x[..., 2i + 1]) by angle i. cos, sin: [..., R / 2]."""
    w = x.to(wide(x))
    even, odd = w[..., 0::2], w[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


def rope_cache(
    q_pe: Tensor, k_pe: Tensor, latent: Tensor, gamma: Tensor, eps: float, cos: Tensor, sin: Tensor, positions: Tensor,
    slots: Tensor, rows: Tensor,
) -> Tensor:  # fmt: skip
    """Rotated q_pe [T, H, R]; writes [normed latent, rotated k_pe] of token t to rows[slots[t]].

    q_pe [T, H, R], k_pe [T, R], latent [T, L], gamma [L] and eps of its norm, cos and sin [positions, R / 2] float,
    positions [T] int64, slots [T] int64 (negative: a padding token, written nowhere), rows [cache rows, L + R],
    changed in place.
    """
    c, s = cos[positions], sin[positions]
    new = torch.cat([rmsnorm(latent, gamma, eps), rotate(k_pe, c, s)], -1)
    kept = slots >= 0
    rows[slots[kept]] = new[kept]
    return rotate(q_pe, c[:, None], s[:, None])
