"""Every tensor of a demo checkpoint: names, dtypes and shapes, file by file; no bytes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from convert.demo.geometry import GROUP, Dialect, Geometry

BYTES = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One stored tensor. `noise` is drawn from N(mean, std); the other kinds are the three parts of an INT4 weight."""

    name: str
    dtype: Literal["BF16", "F32", "I32", "I64"]
    shape: tuple[int, ...]
    kind: Literal["noise", "packed", "scale", "shape"] = "noise"
    mean: float = 0.0
    std: float = 0.0
    logical: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


def shards(geometry: Geometry, dialect: Dialect = "k2.6") -> list[list[TensorSpec]]:
    """Tensors of each file: a layer a file, then embedding with norm and head, projector, vision tower.

    Within a file, wide dtypes come first and names ascend, the order in which safetensors itself writes.
    """
    prefix = "" if dialect == "k2-thinking" else "language_model."
    parts = [list(_layer(geometry, prefix, layer)) for layer in range(geometry.layers)]
    parts.append(list(_ends(geometry, prefix)))
    if dialect != "k2-thinking":
        parts += [list(_projector(geometry)), list(_tower(geometry))]
    widths = {"F32": 0, "I32": 1, "BF16": 2}
    return [sorted(part, key=lambda t: (widths[t.dtype], t.name)) for part in parts]


def linear(name: str, out: int, fan_in: int, gain: float = 1.0) -> TensorSpec:
    """A BF16 weight [out, fan_in] that keeps the variance of its input times gain squared."""
    return TensorSpec(name=f"{name}.weight", dtype="BF16", shape=(out, fan_in), std=gain * fan_in**-0.5)


def norm(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=f"{name}.weight", dtype="BF16", shape=(size,), mean=1.0, std=0.1)


def bias(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=f"{name}.bias", dtype="BF16", shape=(size,), std=0.05)


def int4(name: str, out: int, fan_in: int) -> Iterator[TensorSpec]:
    """The three stored parts of an INT4 weight [out, fan_in]: eight codes a word, one scale a group of 32."""
    logical, words, groups = (out, fan_in), (out, fan_in // 8), (out, fan_in // GROUP)
    std = fan_in**-0.5
    yield TensorSpec(name=f"{name}.weight_packed", dtype="I32", shape=words, kind="packed", logical=logical, std=std)
    yield TensorSpec(name=f"{name}.weight_scale", dtype="BF16", shape=groups, kind="scale", logical=logical)
    yield TensorSpec(name=f"{name}.weight_shape", dtype="I32", shape=(2,), kind="shape", logical=logical)


def _layer(g: Geometry, prefix: str, layer: int) -> Iterator[TensorSpec]:
    at = f"{prefix}model.layers.{layer}"
    attn, mlp = f"{at}.self_attn", f"{at}.mlp"
    yield norm(f"{at}.input_layernorm", g.hidden)
    yield linear(f"{attn}.q_a_proj", g.q_lora, g.hidden)
    yield norm(f"{attn}.q_a_layernorm", g.q_lora)
    yield linear(f"{attn}.q_b_proj", g.heads * (g.qk_nope + g.qk_rope), g.q_lora)
    yield linear(f"{attn}.kv_a_proj_with_mqa", g.kv_lora + g.qk_rope, g.hidden)
    yield norm(f"{attn}.kv_a_layernorm", g.kv_lora)
    yield linear(f"{attn}.kv_b_proj", g.heads * (g.qk_nope + g.v_head), g.kv_lora)
    yield linear(f"{attn}.o_proj", g.hidden, g.heads * g.v_head)
    yield norm(f"{at}.post_attention_layernorm", g.hidden)
    if layer < g.dense_layers:
        yield from _ffn(mlp, g.hidden, g.dense_ff)
        return
    # Sigmoids of N(0, 1.5) spread over most of (0, 1), and the bias is wide enough to change many choices.
    yield linear(f"{mlp}.gate", g.experts, g.hidden, gain=1.5)
    yield TensorSpec(name=f"{mlp}.gate.e_score_correction_bias", dtype="F32", shape=(g.experts,), std=0.05)
    yield from _ffn(f"{mlp}.shared_experts", g.hidden, g.moe_ff * g.shared_experts)
    for e in range(g.experts):
        yield from int4(f"{mlp}.experts.{e}.gate_proj", g.moe_ff, g.hidden)
        yield from int4(f"{mlp}.experts.{e}.up_proj", g.moe_ff, g.hidden)
        yield from int4(f"{mlp}.experts.{e}.down_proj", g.hidden, g.moe_ff)


def _ffn(at: str, hidden: int, width: int) -> Iterator[TensorSpec]:
    yield linear(f"{at}.gate_proj", width, hidden)
    yield linear(f"{at}.up_proj", width, hidden)
    yield linear(f"{at}.down_proj", hidden, width)


def _ends(g: Geometry, prefix: str) -> Iterator[TensorSpec]:
    yield TensorSpec(name=f"{prefix}model.embed_tokens.weight", dtype="BF16", shape=(g.vocab, g.hidden), std=1.0)
    yield norm(f"{prefix}model.norm", g.hidden)
    yield linear(f"{prefix}lm_head", g.vocab, g.hidden)


def _projector(g: Geometry) -> Iterator[TensorSpec]:
    yield from (norm("mm_projector.pre_norm", g.vit_hidden), bias("mm_projector.pre_norm", g.vit_hidden))
    yield from (linear("mm_projector.proj.0", g.merged, g.merged), bias("mm_projector.proj.0", g.merged))
    yield from (linear("mm_projector.proj.2", g.hidden, g.merged), bias("mm_projector.proj.2", g.hidden))


def _tower(g: Geometry) -> Iterator[TensorSpec]:
    width, embed = g.vit_hidden, "vision_tower.patch_embed"
    pixels = 3 * g.patch**2
    yield TensorSpec(name=f"{embed}.proj.weight", dtype="BF16", shape=(width, 3, g.patch, g.patch), std=pixels**-0.5)
    yield bias(f"{embed}.proj", width)
    yield TensorSpec(name=f"{embed}.pos_emb.weight", dtype="BF16", shape=(g.pos_height, g.pos_width, width), std=0.5)
    for b in range(g.vit_layers):
        block = f"vision_tower.encoder.blocks.{b}"
        yield from (norm(f"{block}.norm0", width), bias(f"{block}.norm0", width))
        yield from (linear(f"{block}.wqkv", 3 * width, width), bias(f"{block}.wqkv", 3 * width))
        yield from (linear(f"{block}.wo", width, width), bias(f"{block}.wo", width))
        yield from (norm(f"{block}.norm1", width), bias(f"{block}.norm1", width))
        yield from (linear(f"{block}.mlp.fc0", g.vit_ff, width), bias(f"{block}.mlp.fc0", g.vit_ff))
        yield from (linear(f"{block}.mlp.fc1", width, g.vit_ff), bias(f"{block}.mlp.fc1", width))
    yield norm("vision_tower.encoder.final_layernorm", width)
    yield bias("vision_tower.encoder.final_layernorm", width)
