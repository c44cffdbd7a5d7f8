"""The text decoder: MLA attention, dense layers first, then mixture-of-experts layers. No kernel is named here."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime_min.artifact import Artifact, Stored
from runtime_min.aside import Aside
from runtime_min.kernels.linear.launch import MOST_TOKENS
from runtime_min.kv import FEW_QUERIES, Batch, DraftCache, LatentCache, Part
from runtime_min.models.rope import softmax_scale, tables
from runtime_min.ops import MoeShape, Ops
from runtime_min.pages import PAGE_TOKENS
from runtime_min.ranks import Ranks
from specs.dims import TextDims
from specs.draft import DraftConfig
from specs.mesh import cut

INNER_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run may choose. `inner_eps`: epsilon of the two norms inside MLA, on which implementations disagree."""

    dtype: torch.dtype
    device: torch.device
    inner_eps: float = INNER_EPS
    positions: int = 0


class Around(Protocol):
    """What MLA needs of its model, the target or a draft: sizes, rotary tables, the factor of the scores, ops."""

    ops: Ops
    cos: Tensor
    sin: Tensor
    scale: float
    inner_eps: float

    @property
    def dims(self) -> TextDims | DraftConfig: ...


class Attention:
    """MLA of one layer in absorbed form. Reads and writes one layer of the latent cache."""

    def __init__(self, weights: dict[str, Stored], name: str, layer: int, model: Around) -> None:
        """Weights called `name`.qkv_a and so on; layer: of the cache."""

        def dense(part: str) -> Tensor:
            return weights[f"{name}.{part}"].tensor

        self.qkv_a, self.q_a_norm, self.kv_a_norm = dense("qkv_a"), dense("q_a_norm"), dense("kv_a_norm")
        self.w_uk, self.w_uv = dense("w_uk"), dense("w_uv")
        self.heads = self.w_uk.shape[0]
        self.q_b, self.o = dense("q_b").flatten(0, 1), dense("o").flatten(1)
        self.layer, self.model = layer, model

    def __call__(self, x: Tensor, batch: Batch, cache: LatentCache | DraftCache) -> Tensor:
        """x [T, inputs] -> this rank's share of the output [T, hidden]."""
        m, d, ops = self.model, self.model.dims, self.model.ops
        eps = m.inner_eps
        q_a, latent, k_pe = torch.split(ops.linear(x, self.qkv_a), [d.q_lora, d.kv_lora, d.qk_rope], -1)
        q = ops.norm_linear(q_a, self.q_a_norm, eps, self.q_b).view(-1, self.heads, d.qk_head)
        q_nope, q_pe = torch.split(q, [d.qk_nope, d.qk_rope], -1)
        rows = cache.rows[self.layer]
        q_pe = ops.rope_cache(q_pe, k_pe, latent, self.kv_a_norm, eps, m.cos, m.sin, batch.positions, batch.slots, rows)
        size = cache.page_tokens
        out = [self._attended(q_nope[p.first : p.last], q_pe[p.first : p.last], rows, p, size) for p in batch.parts]
        return ops.linear((out[0] if len(out) == 1 else torch.cat(out)).flatten(1), self.o)

    def _attended(self, q_nope: Tensor, q_pe: Tensor, rows: Tensor, part: Part, size: int) -> Tensor:
        """Output [T, heads, v_head] of the part's query tokens; size: tokens of a page."""
        ops = self.model.ops
        where = (rows, part.pages, part.cu_q, part.lengths, size, self.model.scale)
        if part.longest > FEW_QUERIES and part.tree is None:
            return ops.mla_prefill(q_nope.contiguous(), q_pe, self.w_uk, self.w_uv, *where, part.bounds)
        q_lat = ops.heads_linear(q_nope, self.w_uk, True)
        o_lat = ops.mla_decode(q_lat, q_pe, *where, part.longest, part.masks)
        return ops.heads_linear(o_lat, self.w_uv, False)


class Dense:
    """down(silu(gate x) * up x), this rank's share."""

    def __init__(self, weights: dict[str, Stored], name: str, ops: Ops) -> None:
        self.gate_up, self.down = weights[f"{name}.gate_up"].tensor, weights[f"{name}.down"].tensor
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.silu_linear(self.ops.linear(x, self.gate_up), self.down)


class Experts:
    """Routed experts of this rank plus its share of the shared expert, which has neither gate nor factor."""

    def __init__(self, weights: dict[str, Stored], layer: int, model: "Decoder") -> None:
        name, d, ranks = f"layers.{layer}", model.dims, model.ranks
        self.router, self.bias = weights[f"{name}.router"].tensor, weights[f"{name}.router_bias"].tensor
        self.gate_up, self.down = weights[f"{name}.experts.gate_up"], weights[f"{name}.experts.down"]
        self.shared = Dense(weights, f"{name}.shared", model.ops)
        # One after the other in memory, few tokens are multiplied with both at once; in the router's dtype, which must
        # lose nothing.
        self.sizes, self.both = [len(self.router), len(self.shared.gate_up)], None
        if ranks.groups == 1 and model.settings.dtype.itemsize <= self.bias.dtype.itemsize:
            self.both = torch.cat([self.router, self.shared.gate_up])
            self.router, self.shared.gate_up = torch.split(self.both, self.sizes)
        self.first = cut(d.experts, ranks.mesh.ep, ranks.mesh.index("ep", ranks.rank))[0]
        self.shape = MoeShape(
            hidden=d.hidden,
            width=d.moe_ff // ranks.mesh.etp,
            gate_up=(self.gate_up.parameters["tile_n"], self.gate_up.parameters["tile_k"]),
            down=(self.down.parameters["tile_n"], self.down.parameters["tile_k"]),
        )
        self.dims, self.ops, self.ranks = d, model.ops, ranks

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        """x [T, hidden] of this group -> this rank's share for the tokens of every group [groups * rows, hidden].

        The router adds up in FP32, as its bias is stored.
        """
        aside = Aside(x)
        if self.both is not None and len(x) <= MOST_TOKENS:
            every, both = x, self.ops.linear(x, self.both, self.bias.dtype)
            logits, gate_up = torch.split(both, self.sizes, -1)
            with aside:
                shared = self.ops.silu_linear(gate_up, self.shared.down)
        else:
            with aside:
                shared = self.shared(x)
            every = self.ranks.brought(x, rows)
            logits = self.ops.linear(every, self.router, self.bias.dtype)
        routing = self.ops.route(logits, self.bias, self.dims.top_k, self.dims.routed_scale)
        aside.join()
        return self.ops.moe_int4(
            every,
            self.gate_up.tensor,
            self.down.tensor,
            routing,
            self.first,
            self.shape,
            shared,
            self.ranks.place(rows),
        )


class Decoder:
    """One rank's text model. `forward` appends a step to the cache and returns the logits that the batch asks for."""

    def __init__(self, dims: TextDims, weights: dict[str, Stored], ops: Ops, ranks: Ranks, settings: Settings) -> None:
        d = self.dims = dims
        self.ops, self.ranks, self.settings, self.inner_eps = ops, ranks, settings, settings.inner_eps
        positions = settings.positions or d.context
        wide = torch.float64 if settings.dtype == torch.float64 else torch.float32
        self.cos, self.sin = (t.to(settings.device) for t in tables(d.rope, d.qk_rope, positions, wide))
        self.scale = softmax_scale(d)
        self.embed, self.norm, self.head = (weights[n].tensor for n in ("embed", "norm", "head"))
        self.vocab = cut(d.vocab, ranks.mesh.tp, ranks.mesh.index("tp", ranks.rank))
        self.layers = [self._layer(weights, i) for i in range(d.layers)]

    @classmethod
    def load(cls, artifact: Artifact, ops: Ops, ranks: Ranks, settings: Settings) -> "Decoder":
        """The model of one rank of an artifact."""
        weights = artifact.weights(settings.device, settings.dtype)
        return cls(artifact.config.text, weights, ops, ranks, settings)

    def _layer(self, weights: dict[str, Stored], i: int) -> tuple[Tensor, Attention, Tensor, Dense | Experts]:
        ffn: Dense | Experts
        ffn = Dense(weights, f"layers.{i}.mlp", self.ops) if i < self.dims.dense_layers else Experts(weights, i, self)
        norms = [weights[f"layers.{i}.{n}"].tensor for n in ("input_norm", "ffn_norm")]
        return norms[0], Attention(weights, f"layers.{i}.attn", i, self), norms[1], ffn

    def cache(self, tokens: int, page_tokens: int = PAGE_TOKENS) -> LatentCache:
        """A latent cache for `tokens` tokens over all sequences."""
        d = self.dims
        return LatentCache(d.layers, tokens, d.kv_a, self.settings.dtype, self.settings.device, page_tokens)

    def forward(self, batch: Batch, cache: LatentCache, pictures: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Logits [n, vocab] of the tokens batch.last, in the dtype of the run; equal on every rank.

        pictures: (which of the batch's tokens [m] int64, what stands for them instead of embeddings [m, hidden]).
        """
        return self.tapped(batch, cache, pictures)[0]

    @torch.inference_mode()
    def tapped(
        self,
        batch: Batch,
        cache: LatentCache,
        pictures: tuple[Tensor, Tensor] | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`forward`'s logits, and the residual stream of all tokens after each layer of `taps` (0-based, ascending),
        side by side [T, taps * hidden]; None without taps."""
        add_rmsnorm, eps = self.ops.add_rmsnorm, self.dims.norm_eps
        h = self.embedded(batch.ids)
        if pictures is not None:
            h.index_copy_(0, *pictures)
        x = self.ops.rmsnorm(h, self.layers[0][0], eps)
        following = [layer[0] for layer in self.layers[1:]] + [self.norm]
        states = []
        for i, ((_, attention, ffn_norm, ffn), next_norm) in enumerate(zip(self.layers, following, strict=True)):
            h, x = add_rmsnorm(self.ranks.sum(attention(x, batch, cache)), h, ffn_norm, eps)
            h, x = add_rmsnorm(self._summed(ffn, x, batch.rows), h, next_norm, eps)
            if i in taps:
                states.append(h)
        logits = self.ranks.join(self.ops.linear(x[batch.last], self.head))
        return logits, torch.cat(states, -1) if states else None

    def _summed(self, ffn: Dense | Experts, x: Tensor, rows: int) -> Tensor:
        """The whole output [T, hidden]; groups of ranks meet in the experts only."""
        if isinstance(ffn, Dense):
            return self.ranks.sum(ffn(x))
        return self.ranks.sum_own(ffn(x, rows), rows, len(x))

    def embedded(self, ids: Tensor) -> Tensor:
        """Rows of the vocabulary-cut embedding [T, hidden]; a rank adds zeros for ids it does not hold."""
        low, high = self.vocab
        mine = (ids >= low) & (ids < high)
        rows = self.embed[(ids - low).clamp(0, high - low - 1)]
        return self.ranks.sum(torch.where(mine[:, None], rows, torch.zeros_like(rows)))
