"""What drafts of every kind share: rotary tables of their own, cached rows in the target's pages, the output head."""

import torch
from torch import Tensor

from runtime_min.artifact import Stored
from runtime_min.kv import DraftCache, LatentCache
from runtime_min.models.decoder import Decoder, Dense
from runtime_min.models.rope import tables
from specs.draft import DraftConfig

Weights = dict[str, Stored]


class Base:
    """One rank's draft beside its target, whose ranks, ops, dtype and, where the file has none, output head it uses.

    taps: layers of the target whose outputs it reads, 0-based, low to high.
    """

    def __init__(self, dims: DraftConfig, weights: Weights, target: Decoder) -> None:
        self.dims, self.weights, self.target = dims, weights, target
        self.ops, self.ranks, self.taps = target.ops, target.ranks, dims.taps
        self.inner_eps = dims.norm_eps
        how = target.settings
        wide = torch.float64 if how.dtype == torch.float64 else torch.float32
        # A block may begin at the target's last position.
        positions = len(target.cos) + dims.block
        made = tables(dims.rope, dims.qk_rope or dims.head_dim, positions, wide)
        self.cos, self.sin = (t.mul_(dims.rope_amplitude).to(how.device) for t in made)
        self.fc = self.tensor("fc")
        self.head = self.tensor("head") if "head" in weights else target.head
        self.ids: Tensor | None = None
        if "d2t" in weights:
            # The file stores differences.
            table = self.tensor("d2t").long()
            self.ids = torch.arange(len(table), device=table.device) + table

    def tensor(self, name: str) -> Tensor:
        return self.weights[name].tensor

    @property
    def width(self) -> int:
        """Values that a token takes in one layer of the cache, on this rank."""
        raise NotImplementedError

    def cache(self, target: LatentCache) -> DraftCache:
        """Room for the draft in the pages of the target's cache."""
        shape = (self.dims.layers, target.rows.shape[1], self.width)
        return DraftCache(target.rows.new_zeros(shape), target.page_tokens)

    def mlp(self, name: str) -> Dense:
        return Dense(self.weights, name, self.ops)

    def logits(self, out: Tensor) -> Tensor:
        """out [n, hidden] -> [n, vocab of the target], the same on every rank; -inf for tokens the draft lacks."""
        found = self.ranks.join(self.ops.linear(out, self.head))
        vocab = self.target.dims.vocab
        if self.ids is None:
            # Rows beyond the target's vocabulary are padding.
            return found[:, :vocab]
        return found.new_full((len(found), vocab), -torch.inf).index_copy_(1, self.ids, found[:, : len(self.ids)])
