"""DFlash: a block of tokens in one pass, over keys and values made of the target's states alone."""

import torch
from torch import Tensor

from runtime_min.artifact import Stored
from runtime_min.drafts.base import Base
from runtime_min.drafts.grouped import Grouped
from runtime_min.kv import Batch, DraftCache
from runtime_min.models.decoder import Decoder
from specs.draft import DraftConfig


class DFlash(Base):
    """`context` takes in tokens that stand, `block_logits` guesses those after them."""

    def __init__(self, dims: DraftConfig, weights: dict[str, Stored], target: Decoder) -> None:
        super().__init__(dims, weights, target)
        assert dims.mask_id is not None, "a DFlash draft has a mask token"
        self.block, self.mask_id = dims.block, dims.mask_id
        self.hidden_norm, self.norm = self.tensor("hidden_norm"), self.tensor("norm")
        every = range(dims.layers)
        self.attentions = [Grouped(self, f"layers.{i}.attn", i, joined=False) for i in every]
        self.ffns = [self.mlp(f"layers.{i}.mlp") for i in every]
        self.input_norms, self.ffn_norms = (
            [self.tensor(f"layers.{i}.{name}") for i in every] for name in ("input_norm", "ffn_norm")
        )

    @property
    def width(self) -> int:
        return 2 * self.dims.kv_heads // self.ranks.mesh.tp * self.dims.head_dim

    @torch.inference_mode()
    def context(self, states: Tensor, batch: Batch, cache: DraftCache) -> None:
        """Keeps the keys and values that the target's states [T, taps * hidden] of the batch's tokens give."""
        x = self.ops.rmsnorm(self.ops.linear(states, self.fc), self.hidden_norm, self.dims.norm_eps)
        for attention in self.attentions:
            attention.write(attention.keys_values(x, batch), batch, cache)

    @torch.inference_mode()
    def block_logits(self, embeds: Tensor, batch: Batch, cache: DraftCache) -> Tensor:
        """Logits [n, block - 1, vocab] of the tokens after the first of each block.

        embeds [n * block, hidden]: of the last token of each sequence, whose target state does not exist yet, and then
        of the mask token. The batch's lengths count the block; its slots are not written, so nothing of it is kept.
        """
        add_rmsnorm, eps = self.ops.add_rmsnorm, self.dims.norm_eps
        h, x = embeds, self.ops.rmsnorm(embeds, self.input_norms[0], eps)
        layers = zip(self.attentions, self.ffn_norms, self.ffns, [*self.input_norms[1:], self.norm], strict=True)
        for attention, ffn_norm, ffn, next_norm in layers:
            share = attention(x, batch, cache, attention.keys_values(x, batch))
            h, x = add_rmsnorm(self.ranks.sum(share), h, ffn_norm, eps)
            h, x = add_rmsnorm(self.ranks.sum(ffn(x)), h, next_norm, eps)
        guessed = x.view(-1, self.block, x.shape[1])[:, 1:]
        return self.logits(guessed.flatten(0, 1)).view(len(guessed), self.block - 1, -1)
