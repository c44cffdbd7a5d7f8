"""The DFlash draft for training: blocks of masks side by side over one sequence, each seeing the context before it."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from convert.demo.training.drafts import BLOCK, HEAD_DIM, Draft
from convert.demo.training.model import norm
from convert.demo.training.params import Params
from convert.demo.training.rope import rotated_halves


@lru_cache(16)
def anchors(first: int, length: int, device: torch.device) -> Tensor:
    """Positions of the blocks' first tokens: from `first` on, one block after another, within `length` tokens."""
    return torch.arange(first, length - BLOCK + 1, BLOCK).to(device)


def visible(starts: Tensor, length: int, window: int) -> Tensor:
    """[blocks * BLOCK, length + blocks * BLOCK]: which context and block keys a block's row sees.

    Context before the block, and the whole block; with a window, keys nearer than that on either side.
    """
    at = (starts[:, None] + torch.arange(BLOCK, device=starts.device)).flatten()
    block = torch.arange(len(at), device=starts.device) // BLOCK
    positions = torch.cat([torch.arange(length, device=starts.device), at])
    context = torch.arange(length, device=starts.device)[None] < starts.repeat_interleave(BLOCK)[:, None]
    seen = torch.cat([context, block[:, None] == block], 1)
    return seen & ((at[:, None] - positions).abs() < window) if window else seen


def windows(draft: Draft) -> list[int]:
    """Window of each layer, 0 for full attention."""
    return [draft.config["sliding_window"] if t.startswith("sliding") else 0 for t in draft.config["layer_types"]]


def blocks(draft: Draft, w: Params, states: Tensor, embeds: Tensor, starts: Tensor) -> Tensor:
    """What the head reads of every block's rows, [B, blocks * BLOCK, hidden].

    states [B, S, taps * hidden]; embeds [B, blocks * BLOCK, hidden]: the first token of a block, then masks.
    """
    eps, dtype, (b, s, _) = draft.eps, w["fc"].dtype, states.shape
    table = draft.rope.table(HEAD_DIM, s, states.device)
    at = (starts[:, None] + torch.arange(BLOCK, device=starts.device)).flatten()
    context = norm(linear(states.to(dtype), w["fc"]), w["hidden_norm"], eps, dtype)
    x = embeds.float()
    for i, window in enumerate(windows(draft)):

        def heads(y: Tensor, name: str, i: int = i) -> Tensor:
            return linear(y, w[f"attn.{name}"][i]).view(b, y.shape[1], -1, HEAD_DIM)

        def turned(y: Tensor, name: str, places: Tensor, i: int = i) -> Tensor:
            return rotated_halves(norm(heads(y, name), w[f"attn.{name}_norm"][i], eps, dtype), places)

        z = norm(x, w["input_norm"][i], eps, dtype)
        q = turned(z, "q", table[at])
        k = torch.cat([turned(context, "k", table), turned(z, "k", table[at])], 1)
        v = torch.cat([heads(context, "v"), heads(z, "v")], 1)
        mask = visible(starts, s, window)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=HEAD_DIM**-0.5)
        x = x + linear(seen.transpose(1, 2).flatten(2), w["attn.o"][i])
        y = norm(x, w["ffn_norm"][i], eps, dtype)
        x = x + linear(silu(linear(y, w["mlp.gate"][i])) * linear(y, w["mlp.up"][i]), w["mlp.down"][i])
    return norm(x, w["norm"], eps, dtype)
