"""The model's forward pass for training: the checkpoint's mathematics over whole sequences, no cache."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

from convert.demo.geometry import Geometry
from convert.demo.training.experts import routed
from convert.demo.training.params import Params
from convert.demo.training.rope import Rope, rotated

INNER_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What config.json states beyond the sizes."""

    geometry: Geometry
    rope: Rope
    norm_eps: float
    routed_scale: float


class Pictures(NamedTuple):
    """Flat positions [m] in the batch, and what stands there instead of embeddings [m, hidden]."""

    where: Tensor
    rows: Tensor


class Out(NamedTuple):
    """hidden [B, S, H]: normalized, ready for the head. taps: the residual stream after the layers asked for."""

    hidden: Tensor
    taps: list[Tensor]
    loads: Tensor
    lost: Tensor


def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return rms_norm(x.float(), weight.shape, weight.float(), eps).to(dtype)


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention [B, heads, S, D]; values narrower than keys are padded so that every backend takes them."""
    narrow = v.shape[-1]
    out = scaled_dot_product_attention(q, k, pad(v, (0, q.shape[-1] - narrow)), is_causal=True, scale=scale)
    return out[..., :narrow]


def mla(f: Facts, w: Params, x: Tensor, layer: int, table: Tensor) -> Tensor:
    """x [B, S, H] -> [B, S, H]."""
    g, (b, s, _) = f.geometry, x.shape
    dtype = x.dtype
    q_a = norm(linear(x, w["attn.q_a"][layer]), w["attn.q_a_norm"][layer], INNER_EPS, dtype)
    q = linear(q_a, w["attn.q_b"][layer]).view(b, s, g.heads, -1)
    q_nope, q_pe = torch.split(q, [g.qk_nope, g.qk_rope], -1)
    latent, k_pe = torch.split(linear(x, w["attn.kv_a"][layer]), [g.kv_lora, g.qk_rope], -1)
    latent = norm(latent, w["attn.kv_a_norm"][layer], INNER_EPS, dtype)
    kv = linear(latent, w["attn.kv_b"][layer]).view(b, s, g.heads, -1)
    k_nope, v = torch.split(kv, [g.qk_nope, g.v_head], -1)
    k_pe = rotated(k_pe[:, :, None], table).expand(-1, -1, g.heads, -1)
    q = torch.cat([q_nope, rotated(q_pe, table)], -1).transpose(1, 2)
    k = torch.cat([k_nope, k_pe], -1).transpose(1, 2)
    seen = causal(q, k, v.transpose(1, 2), f.rope.softmax_scale(g.qk_nope + g.qk_rope))
    return linear(seen.transpose(1, 2).flatten(2), w["attn.o"][layer])


def ffn(w: Params, name: str, at: int, x: Tensor) -> Tensor:
    inner = silu(linear(x, w[f"{name}.gate"][at])) * linear(x, w[f"{name}.up"][at])
    return linear(inner, w[f"{name}.down"][at])


def embedded(w: Params, ids: Tensor, pictures: Pictures | None) -> Tensor:
    """The residual stream's beginning [B, S, H] in float32."""
    h = torch.nn.functional.embedding(ids, w["embed"]).float()
    if pictures is None:
        return h
    return h.flatten(0, 1).index_copy(0, pictures.where, pictures.rows.float()).view_as(h)


def forward(
    f: Facts, w: Params, biases: Tensor, ids: Tensor, *, pictures: Pictures | None = None,
    taps: tuple[int, ...] = (), factor: float | None = None,
) -> Out:  # fmt: skip
    """ids [B, S] -> hidden states. w: `used` weights. biases [sparse layers, E] fp32. factor: see `capacity`."""
    g, dtype = f.geometry, w["head"].dtype
    w = {n: _layers(t) if n.split(".")[0] in STACKED else t for n, t in w.items()}  # type: ignore[misc]
    h = embedded(w, ids, pictures)
    table = f.rope.table(g.qk_rope, ids.shape[1], h.device)
    kept, loads, lost = [], [], []
    for i in range(g.layers):
        h = h + mla(f, w, norm(h, w["input_norm"][i], f.norm_eps, dtype), i, table)
        x = norm(h, w["ffn_norm"][i], f.norm_eps, dtype)
        j = i - g.dense_layers
        if j < 0:
            h = h + ffn(w, "mlp", i, x)
        else:
            flat = x.flatten(0, 1)
            scores = linear(flat.float(), w["router"][j].float()).sigmoid()
            three = w["experts.gate"][j], w["experts.up"][j], w["experts.down"][j]
            made = routed(flat, scores, biases[j], three, g.top_k, f.routed_scale, factor)
            h = h + ffn(w, "shared", j, x) + made.out.view_as(x)
            loads.append(made.loads)
            lost.append(made.lost)
        if i in taps:
            kept.append(h)
    return Out(norm(h, w["norm"], f.norm_eps, dtype), kept, torch.stack(loads), torch.stack(lost).mean())


STACKED = ("attn", "mlp", "shared", "experts", "router", "input_norm", "ffn_norm")


def _layers(stack: Tensor) -> tuple[Tensor, ...]:
    """One tensor a layer; their gradients are joined once."""
    return stack.unbind(0)


def logits(w: Params, hidden: Tensor) -> Tensor:
    return linear(hidden, w["head"]).float()
