"""Attention of a dense draft on a GPU: torch's own, over pages that are gathered first.

Nothing waits for the card and every shape follows from shapes, so that a step can be captured in a graph.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# Queries of a sequence at a time: bounds the mask of a long prompt.
SLICE = 1024
# Those that take any mask.
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def gqa(
    q: Tensor, rows: Tensor, pages: Tensor, cu_q: Tensor, lengths: Tensor, page_tokens: int, scale: float, longest: int,
    block: Tensor | None = None, window: int = 0, causal: bool = True, tree: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """As in ref.py."""
    tokens, heads, head = q.shape
    if not tokens:
        return torch.empty_like(q)
    longest = min(longest, tokens)
    first, count = cu_q[:-1].long(), cu_q.diff().long()
    held = lengths if block is None else lengths - count
    keys, kv = _gathered(rows, pages, held, lengths - count, page_tokens, window, longest)
    if block is not None:
        i = torch.arange(longest, device=q.device)
        mine = block[(first[:, None] + i).clamp(max=tokens - 1)]
        own = torch.where(i < count[:, None], held[:, None] + i, -1)
        keys, kv = torch.cat([keys, own], 1), torch.cat([kv, mine], 1)
    k, v = kv.view(*keys.shape, 2, -1, head).permute(2, 0, 3, 1, 4)
    group, out = heads // k.shape[1], []
    for start in range(0, longest, SLICE):
        i = torch.arange(start, min(start + SLICE, longest), device=q.device)
        token = (first[:, None] + i).clamp(max=tokens - 1)
        seen = _seen(keys, (lengths - count)[:, None] + i, window, causal)
        if tree is not None:
            seen = _visible(keys, tree[0], tree[1][token])
        # The heads of a group are more queries to the same keys.
        x = q[token].view(*token.shape, -1, group, head).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = (seen & (keys >= 0)[:, None]).repeat(1, group, 1)[:, None]
        with sdpa_kernel(BACKENDS):
            y = scaled_dot_product_attention(x, k, v, attn_mask=mask, scale=scale)
        out.append(y.reshape(len(token), -1, group, len(i), head).permute(0, 3, 1, 2, 4).flatten(2, 3))
    every = torch.arange(tokens, dtype=cu_q.dtype, device=q.device)
    sequence = torch.searchsorted(cu_q, every, right=True) - 1
    return torch.cat(out, 1)[sequence, every - first[sequence]]


def _gathered(
    rows: Tensor, pages: Tensor, held: Tensor, queries: Tensor, page_tokens: int, window: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Places of cached tokens in their sequence [B, S], -1 where there are none, and their rows [B, S, 2 KV D].

    With a window only the pages that reach into it; `queries` [B] are the places of the first queries.
    """
    most, low = pages.shape[1], torch.zeros_like(held)
    if window:
        most = min(most, -(-(window + longest) // page_tokens) + 1)
        low = ((queries - window + 1).clamp(min=0) // page_tokens).to(low.dtype)
    at = low[:, None].long() + torch.arange(most, device=rows.device)
    page = pages.gather(1, at.clamp(max=pages.shape[1] - 1)).long()
    keys = (at[..., None] * page_tokens + torch.arange(page_tokens, device=rows.device)).flatten(1)
    beyond = keys >= held[:, None]
    # What lies beyond the length belongs to nobody and may be anything, NaN too.
    kv = rows.view(-1, page_tokens, rows.shape[1])[page].flatten(1, 2).masked_fill_(beyond[..., None], 0)
    return keys.masked_fill(beyond, -1), kv


def _seen(keys: Tensor, queries: Tensor, window: int, causal: bool) -> Tensor:
    """keys [B, S] and queries [B, L] as places in their sequence -> [B, L, S]."""
    away = queries[..., None] - keys[:, None]
    seen = away >= 0 if causal else torch.ones_like(away, dtype=torch.bool)
    return seen & (away.abs() < window) if window else seen


def _visible(keys: Tensor, prefix: Tensor, visible: Tensor) -> Tensor:
    """prefix [B], visible [B, L] as in Tree -> [B, L, S]."""
    node = (keys - prefix[:, None])[:, None]
    bits = (visible[..., None] >> node.clamp(0, 63)) & 1
    return (node < 0) | ((node < 64) & (bits == 1))
