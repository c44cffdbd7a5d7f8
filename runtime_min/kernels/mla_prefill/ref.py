"""Attention of many query tokens a sequence, with the latent rows expanded to keys and values, by definition."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime_min.kernels.mla_decode.ref import gather
from runtime_min.kernels.wide import wide


def mla_prefill(
    q_nope: Tensor,
    q_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    rows: Tensor,
    pages: Tensor,
    cu_q: Tensor,
    lengths: Tensor,
    page_tokens: int,
    scale: float,
    bounds: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Tensor:
    """Output [T, H, V].

    q_nope [T, H, D]; w_uk [H, D, L] and w_uv [H, V, L] expand a latent row to a head's key and value; the rest is as
    in mla_decode.
    """
    out = q_nope.new_empty(*q_nope.shape[:2], w_uv.shape[1])
    latent, dtype = w_uk.shape[-1], wide(q_nope)
    uk, uv = w_uk.to(dtype), w_uv.to(dtype)
    for b in range(len(lengths)):
        low, high, length = int(cu_q[b]), int(cu_q[b + 1]), int(lengths[b])
        cached = gather(rows, pages[b], length, page_tokens).to(dtype)
        keys, values = (torch.einsum("kl,hdl->khd", cached[:, :latent], u) for u in (uk, uv))
        scores = torch.einsum("qhd,khd->hqk", q_nope[low:high].to(dtype), keys)
        scores = (scores + torch.einsum("qhd,kd->hqk", q_pe[low:high].to(dtype), cached[:, latent:])) * scale
        seen = (
            torch.arange(length, device=out.device)
            <= torch.arange(length - (high - low), length, device=out.device)[:, None]
        )
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[low:high] = torch.einsum("hqk,khd->qhd", p, values).to(out.dtype)
    return out
