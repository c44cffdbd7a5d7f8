"""Attention of few query tokens a sequence in the latent space, by definition."""

import torch
from torch import Tensor

from runtime_min.kernels.wide import wide


def gather(rows: Tensor, pages: Tensor, length: int, page_tokens: int) -> Tensor:
    """The first `length` cache rows of one sequence, in order. pages [max pages] int32."""
    token = torch.arange(length, device=rows.device)
    return rows[pages[token // page_tokens].long() * page_tokens + token % page_tokens]


def mla_decode(
    q_lat: Tensor,
    q_pe: Tensor,
    rows: Tensor,
    pages: Tensor,
    cu_q: Tensor,
    lengths: Tensor,
    page_tokens: int,
    scale: float,
    longest: int = 16,
    tree: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Output in the latent space [T, H, L].

    q_lat [T, H, L] and q_pe [T, H, R] of B sequences, ragged: cu_q [B + 1] int32 are their bounds in T. rows
    [cache rows, L + R]; pages [B, max pages] int32; lengths [B] int32 counts the cached tokens of each sequence, its
    query tokens included: query i of n sees lengths - n + i + 1 of them. scale multiplies the scores. No sequence has
    more than `longest` query tokens. tree: (prefix [B] int32, visible [T] int64), and then a query sees the keys
    before prefix and key prefix + j where bit j of visible is set, j < 64.
    """
    out, latent = torch.empty_like(q_lat), q_lat.shape[-1]
    for b in range(len(lengths)):
        low, high, length = int(cu_q[b]), int(cu_q[b + 1]), int(lengths[b])
        keys = gather(rows, pages[b], length, page_tokens).to(wide(q_lat))
        q = torch.cat([q_lat[low:high], q_pe[low:high]], -1).to(keys.dtype)
        scores = torch.einsum("qhd,kd->hqk", q, keys) * scale
        token = torch.arange(length, device=q.device)
        seen = token <= token[length - (high - low) :, None]
        if tree is not None:
            node = token - tree[0][b]
            bits = (tree[1][low:high, None] >> node.clamp(0, 63)) & 1
            seen = (node < 0) | ((node < 64) & (bits == 1))
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[low:high] = torch.einsum("hqk,kd->qhd", p, keys[:, :latent]).to(out.dtype)
    return out
