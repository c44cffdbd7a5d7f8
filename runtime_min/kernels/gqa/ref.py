"""Attention of a dense draft over its paged keys and values, by definition."""

import torch
from torch import Tensor

from runtime_min.kernels.mla_decode.ref import gather
from runtime_min.kernels.wide import wide


def gqa(
    q: Tensor,
    rows: Tensor,
    pages: Tensor,
    cu_q: Tensor,
    lengths: Tensor,
    page_tokens: int,
    scale: float,
    longest: int,
    block: Tensor | None = None,
    window: int = 0,
    causal: bool = True,
    tree: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Output [T, H, D] of queries q [T, H, D]; head h reads key and value head h KV / H.

    rows [cache rows, 2 KV D], of each token the keys of its KV heads, then the values; pages, cu_q, lengths and tree as
    in mla_decode. block [T, 2 KV D]: rows of the query tokens themselves, which the cache then need not hold. causal:
    a query sees no key after its own. window: nor one that is `window` or more tokens away, unless it is 0. tree:
    instead of either.
    """
    out = torch.empty_like(q)
    heads, head = q.shape[1:]
    for b in range(len(lengths)):
        low, high, length = int(cu_q[b]), int(cu_q[b + 1]), int(lengths[b])
        if block is None:
            held = gather(rows, pages[b], length, page_tokens)
        else:
            held = torch.cat([gather(rows, pages[b], length - (high - low), page_tokens), block[low:high]])
        kv = held.to(wide(q)).view(length, 2, -1, head)
        keys, values = kv.repeat_interleave(heads // kv.shape[2], 2).unbind(1)
        key = torch.arange(length, device=q.device)
        away = key[length - (high - low) :, None] - key
        seen = (away >= 0) | (not causal)
        if window:
            seen &= away.abs() < window
        if tree is not None:
            node = key - tree[0][b]
            bits = (tree[1][low:high, None] >> node.clamp(0, 63)) & 1
            seen = (node < 0) | ((node < 64) & (bits == 1))
        scores = torch.einsum("qhd,khd->hqk", q[low:high].to(keys.dtype), keys) * scale
        p = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[low:high] = torch.einsum("hqk,khd->qhd", p, values).to(out.dtype)
    return out
