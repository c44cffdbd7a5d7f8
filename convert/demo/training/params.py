"""The trained model's weights: their shapes, how they begin, and their names in the checkpoint.

Weights of all layers of one kind are one tensor, so that casts, quantization and the optimizer are few large kernels.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from convert.demo.geometry import Geometry
from convert.demo.training import quant

Params = dict[str, Tensor]
INT4 = ("experts.gate", "experts.up", "experts.down")


class Row(NamedTuple):
    """One stacked weight. leading: how many of its axes count layers and experts. std 0 begins at `mean`."""

    name: str
    shape: tuple[int, ...]
    leading: int = 0
    std: float = 0.0
    mean: float = 0.0


def rows(g: Geometry) -> list[Row]:
    """Every weight of the model; matrices are [out, in]."""
    n, sparse, h = g.layers, g.layers - g.dense_layers, g.hidden
    out = 0.5 * (2 * n) ** -0.5
    return [
        Row("embed", (g.vocab, h), 0, 0.5),
        Row("head", (g.vocab, h), 0, 0.02),
        Row("norm", (h,), mean=1.0),
        Row("input_norm", (n, h), 1, mean=1.0),
        Row("ffn_norm", (n, h), 1, mean=1.0),
        _matrix("attn.q_a", (n, g.q_lora, h)),
        Row("attn.q_a_norm", (n, g.q_lora), 1, mean=1.0),
        _matrix("attn.q_b", (n, g.heads * (g.qk_nope + g.qk_rope), g.q_lora)),
        _matrix("attn.kv_a", (n, g.kv_lora + g.qk_rope, h)),
        Row("attn.kv_a_norm", (n, g.kv_lora), 1, mean=1.0),
        _matrix("attn.kv_b", (n, g.heads * (g.qk_nope + g.v_head), g.kv_lora)),
        _matrix("attn.o", (n, h, g.heads * g.v_head), out),
        *_ffn("mlp", (g.dense_layers,), h, g.dense_ff, out),
        Row("router", (sparse, g.experts, h), 1, h**-0.5),
        *_ffn("shared", (sparse,), h, g.moe_ff * g.shared_experts, out),
        # Four experts at a factor of 0.7 each add up to 1.4 of one; the rest is caution.
        *_ffn("experts", (sparse, g.experts), h, g.moe_ff, out / 2),
        *_tower(g),
    ]


def _matrix(name: str, shape: tuple[int, ...], gain: float = 1.0) -> Row:
    return Row(name, shape, len(shape) - 2, gain * shape[-1] ** -0.5)


def _ffn(name: str, leading: tuple[int, ...], hidden: int, width: int, gain: float) -> Iterator[Row]:
    yield _matrix(f"{name}.gate", (*leading, width, hidden))
    yield _matrix(f"{name}.up", (*leading, width, hidden))
    yield _matrix(f"{name}.down", (*leading, hidden, width), gain)


def _tower(g: Geometry) -> Iterator[Row]:
    b, c, pixels = g.vit_layers, g.vit_hidden, 3 * g.patch**2
    yield Row("vit.patch", (c, pixels), 0, pixels**-0.5)
    yield Row("vit.patch_bias", (c,))
    yield Row("vit.pos", (g.pos_height, g.pos_width, c), 0, 0.3)
    for norm in ("norm0", "norm1"):
        yield Row(f"vit.{norm}", (b, c), 1, mean=1.0)
        yield Row(f"vit.{norm}_bias", (b, c), 1)
    for name, shape in {"wqkv": (3 * c, c), "wo": (c, c), "fc0": (g.vit_ff, c), "fc1": (c, g.vit_ff)}.items():
        yield _matrix(f"vit.{name}", (b, *shape), 0.3 if name in ("wo", "fc1") else 1.0)
        yield Row(f"vit.{name}_bias", (b, shape[0]), 1)
    for norm in ("final_norm", "projector_norm"):
        yield Row(f"vit.{norm}", (c,), mean=1.0)
        yield Row(f"vit.{norm}_bias", (c,))
    for name, shape in {"proj0": (g.merged, g.merged), "proj2": (g.hidden, g.merged)}.items():
        yield _matrix(f"vit.{name}", shape)
        yield Row(f"vit.{name}_bias", (shape[0],))


def begin(wanted: list[Row], seed: int, device: torch.device) -> Params:
    """Fresh float32 weights, the same on every device."""
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for row in wanted:
        values = torch.full(row.shape, row.mean)
        if row.std:
            values.normal_(row.mean, row.std, generator=draw)
        made[row.name] = values.to(device).requires_grad_()
    return made


def used(params: Params, dtype: torch.dtype) -> Params:
    """The weights as a reader of the stored file has them, in `dtype`; gradients reach the float32 masters."""
    return {n: quant.int4(w, dtype) if n in INT4 else quant.bf16(w, dtype) for n, w in params.items()}


def stored(params: Mapping[str, Tensor], biases: Tensor, g: Geometry) -> dict[str, Tensor]:
    """Every tensor of the checkpoint by its name there. biases [sparse layers, experts] fp32."""
    p = {n: w.detach().float().cpu() for n, w in params.items()}
    out = {
        "language_model.model.embed_tokens.weight": p["embed"],
        "language_model.model.norm.weight": p["norm"],
        "language_model.lm_head.weight": p["head"],
    }
    for layer in range(g.layers):
        out |= _layer(p, biases.cpu(), f"language_model.model.layers.{layer}", layer, layer - g.dense_layers)
    out |= _stored_tower(p, g)
    return {n: t if t.dtype in (torch.int32, torch.bfloat16) else _kept(n, t) for n, t in out.items()}


def _kept(name: str, tensor: Tensor) -> Tensor:
    return tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)


ATTENTION = {
    "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "o": "o_proj",
}  # fmt: skip


def _layer(p: Params, biases: Tensor, at: str, layer: int, sparse: int) -> Params:
    out = {f"{at}.self_attn.{there}.weight": p[f"attn.{here}"][layer] for here, there in ATTENTION.items()}
    out[f"{at}.input_layernorm.weight"] = p["input_norm"][layer]
    out[f"{at}.post_attention_layernorm.weight"] = p["ffn_norm"][layer]
    if sparse < 0:
        return out | {f"{at}.mlp.{m}_proj.weight": p[f"mlp.{m}"][layer] for m in ("gate", "up", "down")}
    out[f"{at}.mlp.gate.weight"] = p["router"][sparse]
    out[f"{at}.mlp.gate.e_score_correction_bias"] = biases[sparse].clone()
    for m in ("gate", "up", "down"):
        out[f"{at}.mlp.shared_experts.{m}_proj.weight"] = p[f"shared.{m}"][sparse]
        for e, weight in enumerate(p[f"experts.{m}"][sparse]):
            name = f"{at}.mlp.experts.{e}.{m}_proj"
            out[f"{name}.weight_packed"], out[f"{name}.weight_scale"] = quant.packed(weight)
            out[f"{name}.weight_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
    return out


def _stored_tower(p: Params, g: Geometry) -> Params:
    out: Params = {"vision_tower.patch_embed.pos_emb.weight": p["vit.pos"]}

    def put(there: str, here: str, block: int | None = None) -> None:
        for suffix, tail in (("weight", ""), ("bias", "_bias")):
            whole = p[f"vit.{here}{tail}"]
            out[f"{there}.{suffix}"] = whole if block is None else whole[block]

    put("vision_tower.patch_embed.proj", "patch")
    weight = "vision_tower.patch_embed.proj.weight"
    out[weight] = out[weight].view(g.vit_hidden, 3, g.patch, g.patch)
    for b in range(g.vit_layers):
        at = f"vision_tower.encoder.blocks.{b}"
        for here, there in {"norm0": "norm0", "wqkv": "wqkv", "wo": "wo", "norm1": "norm1"}.items():
            put(f"{at}.{there}", here, b)
        put(f"{at}.mlp.fc0", "fc0", b)
        put(f"{at}.mlp.fc1", "fc1", b)
    put("vision_tower.encoder.final_layernorm", "final_norm")
    put("mm_projector.pre_norm", "projector_norm")
    put("mm_projector.proj.0", "proj0")
    put("mm_projector.proj.2", "proj2")
    return out
