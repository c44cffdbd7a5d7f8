"""Rotary positions, then attention within each picture or clip, by definition."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime_min.kernels.rope_cache.ref import rotate
from runtime_min.kernels.wide import wide


def vit_attn(qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
    """Output [P, H, D] of P packed patches; item i is the next lengths[i] of them, and sees all of itself.

    qkv [P, 3, H, D], may be overwritten; cos and sin [P, D / 2] rotate the pairs (2i, 2i + 1) of queries and keys.
    """
    q, k, v = qkv.to(wide(qkv)).unbind(1)
    q, k = (rotate(x, cos[:, None], sin[:, None]) * x.shape[-1] ** -0.25 for x in (q, k))
    out = torch.empty_like(q)
    start = 0
    for length in lengths:
        mine = slice(start, start + length)
        # Head by head: the scores of all heads of a large picture would not fit.
        for h in range(q.shape[1]):
            out[mine, h] = (q[mine, h] @ k[mine, h].T).softmax(-1) @ v[mine, h]
        start += length
    return out.to(qkv.dtype)
