"""Dense attention of drafts, rotary halves, over pages: of one layer of a Llama-shaped EAGLE3 or of a DFlash draft."""

import torch
from torch import Tensor

from runtime_min.drafts.base import Base
from runtime_min.kv import Batch, DraftCache
from runtime_min.models.rope import rotate_halves


class Grouped:
    """One layer: its products, norms of heads where it has them, and its rows of the cache: keys, then values."""

    def __init__(self, draft: Base, name: str, layer: int, joined: bool) -> None:
        """joined: queries, keys and values are one product `qkv`; else `q` and `kv` are two."""
        d = draft.dims
        self.draft, self.layer, self.head = draft, layer, d.head_dim
        self.heads = d.heads // draft.ranks.mesh.tp
        self.window, self.causal = d.windows[layer], d.causal[layer]
        self.scale = d.head_dim**-0.5

        def dense(part: str) -> Tensor:
            return draft.tensor(f"{name}.{part}")

        self.o = dense("o").flatten(1)
        if joined:
            qkv, q = dense("qkv").flatten(0, -2), self.heads * d.head_dim
            self.q, self.kv = qkv[:q], qkv[q:]
        else:
            self.q, self.kv = dense("q").flatten(0, -2), dense("kv").flatten(0, -2)
        norms = [f"{name}.{n}" for n in ("q_norm", "k_norm")]
        self.norms = [draft.tensor(n) if n in draft.weights else None for n in norms]

    def keys_values(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, inputs] -> rows [T, 2 KV D]: rotated keys, then values."""
        k, v = self.draft.ops.linear(x, self.kv).chunk(2, -1)
        return torch.cat([self._placed(k, self.norms[1], batch).flatten(1), v], -1)

    def write(self, kv: Tensor, batch: Batch, cache: DraftCache) -> None:
        """Keeps rows at the batch's slots; where those are negative the null page stays as it is."""
        kept = (batch.slots >= 0)[:, None]
        cache.rows[self.layer].index_copy_(0, batch.slots.clamp(min=0), torch.where(kept, kv, torch.zeros_like(kv)))

    def __call__(self, x: Tensor, batch: Batch, cache: DraftCache, block: Tensor | None = None) -> Tensor:
        """This rank's share of the output [T, hidden] for x [T, inputs] over the cache and, if given, the tokens' own
        rows, which are then not in the cache."""
        q = self._placed(self.draft.ops.linear(x, self.q), self.norms[0], batch)
        rows, out = cache.rows[self.layer], []
        for p in batch.parts:
            own = None if block is None else block[p.first : p.last]
            where = (rows, p.pages, p.cu_q, p.lengths, cache.page_tokens, self.scale, p.longest)
            how = (own, self.window, self.causal, p.masks)
            out.append(self.draft.ops.gqa(q[p.first : p.last], *where, *how))
        return self.draft.ops.linear((out[0] if len(out) == 1 else torch.cat(out)).flatten(1), self.o)

    def _placed(self, x: Tensor, norm: Tensor | None, batch: Batch) -> Tensor:
        """x [T, heads D], normed if its kind of draft does so, and rotated [T, heads, D]."""
        if norm is not None:
            x = self.draft.ops.rmsnorm(x.reshape(-1, self.head), norm, self.draft.inner_eps)
        x = x.reshape(len(batch.positions), -1, self.head)
        cos, sin = (t[batch.positions][:, None] for t in (self.draft.cos, self.draft.sin))
        return rotate_halves(x, cos, sin)
