"""EAGLE3 and EAGLE3.1: one layer that reads a token and the state behind it, with MLA or Llama's attention.

Position p holds the pair (token p + 1, state p).
"""

import torch
from torch import Tensor

from runtime_min.artifact import Stored
from runtime_min.drafts.base import Base
from runtime_min.drafts.grouped import Grouped
from runtime_min.kv import Batch, DraftCache
from runtime_min.models.decoder import Attention, Decoder
from runtime_min.models.rope import softmax_scale
from specs.draft import DraftConfig


class Eagle3(Base):
    """`first` starts from target states, `next` from the draft's own; both append to its cache."""

    def __init__(self, dims: DraftConfig, weights: dict[str, Stored], target: Decoder) -> None:
        super().__init__(dims, weights, target)
        self.norm_output = dims.norm_output
        self.fc_norms = [self.tensor(f"fc_norms.{i}") for i in range(dims.fc_norms)]
        names = ("embed_norm", "hidden_norm", "ffn_norm", "norm")
        self.embed_norm, self.hidden_norm, self.ffn_norm, self.norm = map(self.tensor, names)
        self.ffn = self.mlp("mlp")
        self.attention: Attention | Grouped
        if dims.kind == "eagle3_mla":
            self.scale = softmax_scale(dims)
            self.attention = Attention(weights, "attn", 0, self)
        else:
            self.attention = Grouped(self, "attn", 0, joined=True)

    @property
    def width(self) -> int:
        d = self.dims
        return d.kv_a or 2 * d.kv_heads // self.ranks.mesh.tp * d.head_dim

    @torch.inference_mode()
    def first(self, embeds: Tensor, states: Tensor, batch: Batch, cache: DraftCache) -> tuple[Tensor, Tensor]:
        """Token embeddings [T, hidden] and the target's states [T, taps * hidden] of the tokens before -> (state for
        `next`, out for `logits`), [T, hidden] each."""
        if self.fc_norms:
            parts = zip(states.split(self.dims.target_hidden, -1), self.fc_norms, strict=True)  # type: ignore[no-untyped-call]
            states = torch.cat([self.ops.rmsnorm(s, norm, self.dims.norm_eps) for s, norm in parts], -1)
        return self.next(embeds, self.ops.linear(states, self.fc), batch, cache)

    @torch.inference_mode()
    def next(self, embeds: Tensor, state: Tensor, batch: Batch, cache: DraftCache) -> tuple[Tensor, Tensor]:
        """The same from this draft's own states [T, hidden] of the tokens before."""
        ops, eps = self.ops, self.dims.norm_eps
        pair = [ops.rmsnorm(embeds, self.embed_norm, eps), ops.rmsnorm(state, self.hidden_norm, eps)]
        x = torch.cat(pair, -1)
        if isinstance(self.attention, Grouped):
            self.attention.write(self.attention.keys_values(x, batch), batch, cache)
        h, x = ops.add_rmsnorm(self.ranks.sum(self.attention(x, batch, cache)), state, self.ffn_norm, eps)
        state, out = ops.add_rmsnorm(self.ranks.sum(self.ffn(x)), h, self.norm, eps)
        return (out if self.norm_output else state), out
