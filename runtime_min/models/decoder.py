"""The text decoder: MLA attention, one or more dense layers, then mixture-of-experts layers. No kernel is named here."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime_min.artifact import Artifact, Stored
from runtime_min.kv import Batch, LatentCache
from runtime_min.models.rope import softmax_scale, tables
from runtime_min.ops import MoeShape, Ops
from runtime_min.ranks import Ranks
from specs.dims import TextDims
from specs.mesh import cut

INNER_EPS = 1e-6
# Up to this many query tokens a sequence, attention stays in the latent space; above, it is cheaper to expand keys.
DECODE_QUERIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run may choose. `inner_eps`: epsilon of the two norms inside MLA, on which implementations disagree."""

    dtype: torch.dtype
    device: torch.device
    inner_eps: float = INNER_EPS
    positions: int = 0


class Attention:
    """MLA of one layer in absorbed form. Reads and writes one layer of the latent cache."""

    def __init__(self, weights: dict[str, Stored], layer: int, model: "Decoder") -> None:
        def dense(name: str) -> Tensor:
            return weights[f"layers.{layer}.attn.{name}"].tensor

        self.qkv_a, self.q_a_norm, self.kv_a_norm = dense("qkv_a"), dense("q_a_norm"), dense("kv_a_norm")
        self.w_uk, self.w_uv = dense("w_uk"), dense("w_uv")
        self.heads = self.w_uk.shape[0]
        self.q_b, self.o = dense("q_b").flatten(0, 1), dense("o").flatten(1)
        self.layer, self.model = layer, model

    def __call__(self, x: Tensor, batch: Batch, cache: LatentCache) -> Tensor:
        """x [T, hidden] -> this rank's share of the output [T, hidden]."""
        m, d, ops = self.model, self.model.dims, self.model.ops
        q_a, latent, k_pe = torch.split(x @ self.qkv_a.T, [d.q_lora, d.kv_lora, d.qk_rope], -1)
        q = ops.rmsnorm(q_a.contiguous(), self.q_a_norm, m.settings.inner_eps) @ self.q_b.T
        q_nope, q_pe = torch.split(
            q.view(-1, self.heads, d.qk_head), [d.qk_nope, d.qk_rope], -1
        )  # [T, H, nope], [T, H, rope]
        latent = ops.rmsnorm(latent.contiguous(), self.kv_a_norm, m.settings.inner_eps)
        rows = cache.rows[self.layer]
        q_pe = ops.rope_cache(
            q_pe.contiguous(), k_pe.contiguous(), latent, m.cos, m.sin, batch.positions, batch.slots, rows
        )
        where = (rows, batch.pages, batch.cu_q, batch.lengths, cache.page_tokens, m.scale)
        if batch.longest > DECODE_QUERIES:
            out = ops.mla_prefill(q_nope.contiguous(), q_pe, self.w_uk, self.w_uv, *where)
        else:
            q_lat = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)  # [T, H, latent]
            o_lat = ops.mla_decode(q_lat.contiguous(), q_pe, *where)
            out = torch.bmm(o_lat.transpose(0, 1), self.w_uv.transpose(1, 2)).transpose(0, 1)  # [T, H, v]
        return out.flatten(1) @ self.o.T


class Dense:
    """down(silu(gate x) * up x), this rank's share."""

    def __init__(self, weights: dict[str, Stored], name: str, ops: Ops) -> None:
        self.gate_up, self.down = weights[f"{name}.gate_up"].tensor, weights[f"{name}.down"].tensor
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.silu_mul(x @ self.gate_up.T) @ self.down.T


class Experts:
    """Routed experts of this rank plus its share of the shared expert, which has neither gate nor factor."""

    def __init__(self, weights: dict[str, Stored], layer: int, model: "Decoder") -> None:
        name, d, ranks = f"layers.{layer}", model.dims, model.ranks
        self.router, self.bias = weights[f"{name}.router"].tensor, weights[f"{name}.router_bias"].tensor
        self.router = self.router.to(self.bias.dtype)
        self.gate_up, self.down = weights[f"{name}.experts.gate_up"], weights[f"{name}.experts.down"]
        self.shared = Dense(weights, f"{name}.shared", model.ops)
        self.first = cut(d.experts, ranks.mesh.ep, ranks.mesh.index("ep", ranks.rank))[0]
        self.shape = MoeShape(
            hidden=d.hidden,
            width=d.moe_ff // ranks.mesh.etp,
            gate_up=(self.gate_up.parameters["tile_n"], self.gate_up.parameters["tile_k"]),
            down=(self.down.parameters["tile_n"], self.down.parameters["tile_k"]),
        )
        self.dims, self.ops = d, model.ops

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> this rank's share [T, hidden]. The router works in FP32, as its bias does."""
        logits = x.to(self.router.dtype) @ self.router.T
        routing = self.ops.route(logits, self.bias, self.dims.top_k, self.dims.routed_scale)
        routed = self.ops.moe_int4(x, self.gate_up.tensor, self.down.tensor, routing, self.first, self.shape)
        return routed + self.shared(x)


class Decoder:
    """One rank's text model. `forward` appends a step to the cache and returns the logits that the batch asks for."""

    def __init__(self, artifact: Artifact, ops: Ops, ranks: Ranks, settings: Settings) -> None:
        self.dims: TextDims = artifact.config.text
        self.ops, self.ranks, self.settings = ops, ranks, settings
        weights = artifact.weights(settings.device, settings.dtype)
        d = self.dims
        positions = settings.positions or d.context
        wide = torch.float64 if settings.dtype == torch.float64 else torch.float32
        self.cos, self.sin = (t.to(settings.device) for t in tables(d.rope, d.qk_rope, positions, wide))
        self.scale = softmax_scale(d)
        self.embed, self.norm, self.head = (weights[n].tensor for n in ("embed", "norm", "head"))
        self.vocab = cut(d.vocab, ranks.mesh.tp, ranks.mesh.index("tp", ranks.rank))
        self.layers = [self._layer(weights, i) for i in range(d.layers)]

    def _layer(self, weights: dict[str, Stored], i: int) -> tuple[Tensor, Attention, Tensor, Dense | Experts]:
        ffn: Dense | Experts
        ffn = Dense(weights, f"layers.{i}.mlp", self.ops) if i < self.dims.dense_layers else Experts(weights, i, self)
        norms = [weights[f"layers.{i}.{n}"].tensor for n in ("input_norm", "ffn_norm")]
        return norms[0], Attention(weights, i, self), norms[1], ffn

    def cache(self, tokens: int) -> LatentCache:
        """A latent cache for `tokens` tokens over all sequences."""
        d = self.dims
        return LatentCache(d.layers, tokens, d.kv_a, self.settings.dtype, self.settings.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: LatentCache) -> Tensor:
        """Logits [n, vocab] of the tokens batch.last, in the dtype of the run; equal on every rank."""
        h = self._embedded(batch.ids)
        for input_norm, attention, ffn_norm, ffn in self.layers:
            x = self.ops.rmsnorm(h, input_norm, self.dims.norm_eps)
            h = h + self.ranks.sum(attention(x, batch, cache))
            x = self.ops.rmsnorm(h, ffn_norm, self.dims.norm_eps)
            h = h + self.ranks.sum(ffn(x))
        x = self.ops.rmsnorm(h[batch.last], self.norm, self.dims.norm_eps)
        return self.ranks.join(x @ self.head.T)

    def _embedded(self, ids: Tensor) -> Tensor:
        """Rows of the vocabulary-cut embedding [T, hidden]; a rank adds zeros for ids it does not hold."""
        low, high = self.vocab
        mine = (ids >= low) & (ids < high)
        rows = self.embed[(ids - low).clamp(0, high - low - 1)]
        return self.ranks.sum(torch.where(mine[:, None], rows, torch.zeros_like(rows)))
