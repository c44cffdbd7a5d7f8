"""Sizes of a demo checkpoint, and the config.json that states them."""

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

from specs.errors import InputError

GROUP = 32
SPECIALS = 256
Dialect = Literal["k2.6", "k2.5", "k2-thinking", "k2.7-code"]
DIALECTS: tuple[Dialect, ...] = ("k2.6", "k2.5", "k2-thinking", "k2.7-code")


class DemoError(InputError):
    """Sizes or a dialect that no demo checkpoint can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of one checkpoint, by the names that the specs use. The defaults are the tiny model.

    `weights` says what the tensors hold: "model" draws every weight and quantizes the experts, "filler" streams
    blocks of random bytes and is as fast as the disk.
    """

    hidden: int = 256
    layers: int = 3
    dense_layers: int = 1
    heads: int = 8
    q_lora: int = 128
    kv_lora: int = 64
    qk_nope: int = 32
    qk_rope: int = 32
    v_head: int = 32
    dense_ff: int = 512
    experts: int = 16
    top_k: int = 4
    moe_ff: int = 256
    shared_experts: int = 1
    ranks: int = 512
    vit_hidden: int = 64
    vit_heads: int = 4
    vit_layers: int = 2
    vit_ff: int = 128
    patch: int = 14
    pos_height: int = 8
    pos_width: int = 8
    pos_time: int = 4
    merge_height: int = 2
    merge_width: int = 2
    weights: Literal["model", "filler"] = "model"

    def __post_init__(self) -> None:
        problems = [
            f"{name}: found {size}, expected a positive multiple of {step}"
            for name, size, step in (
                ("hidden", self.hidden, GROUP),
                ("moe_ff", self.moe_ff, GROUP),
                ("ranks", self.ranks, 64),
                ("layers", self.layers, 1),
                ("qk_rope", self.qk_rope, 2),
                ("vit_hidden", self.vit_hidden, 4 * self.vit_heads),
            )
            if size < 1 or size % step
        ]
        if self.ranks < 256:
            problems.append(f"ranks: found {self.ranks}, expected at least one for each of the 256 bytes")
        if self.top_k > self.experts:
            problems.append(f"top_k: found {self.top_k}, expected at most the {self.experts} experts")
        if problems:
            raise DemoError([f"demo geometry: {p}; choose another size" for p in problems])

    @property
    def vocab(self) -> int:
        return self.ranks + SPECIALS

    @property
    def merged(self) -> int:
        """Width of the patches that the projector joins into one token."""
        return self.vit_hidden * self.merge_height * self.merge_width

    def special(self, offset: int) -> int:
        """Id of the special token at `offset`: 0 is [BOS], 255 is [PAD]."""
        return self.ranks + offset


TINY = Geometry()
# Small enough to ship with its drafts, and cut by every mesh of up to eight ranks.
TRAINED = Geometry(
    hidden=192,
    layers=4,
    q_lora=64,
    dense_ff=256,
    experts=32,
    ranks=1792,
)
K26 = Geometry(
    hidden=7168,
    layers=61,
    dense_layers=1,
    heads=64,
    q_lora=1536,
    kv_lora=512,
    qk_nope=128,
    qk_rope=64,
    v_head=128,
    dense_ff=18432,
    experts=384,
    top_k=8,
    moe_ff=2048,
    shared_experts=1,
    ranks=163584,
    vit_hidden=1152,
    vit_heads=16,
    vit_layers=27,
    vit_ff=4304,
    pos_height=64,
    pos_width=64,
    weights="filler",
)


def k26(layers: int) -> Geometry:
    """Kimi K2.6 at full width with its first `layers` layers."""
    return replace(K26, layers=layers)


def template(name: str) -> str:
    """Text of a file shipped beside this module."""
    return (files("convert.demo") / "data" / name).read_text(encoding="utf-8")


def config(geometry: Geometry, dialect: Dialect = "k2.6") -> dict[str, Any]:
    """The config.json of `geometry`: the release's keys in the release's order, with sizes and ids replaced."""
    whole: dict[str, Any] = json.loads(template("config.json"))
    text = whole["text_config"]
    ids = {
        "bos_token_id": geometry.special(0),
        "pad_token_id": geometry.special(255),
        "eos_token_id": geometry.special(1 if dialect == "k2.5" else 2),
    }
    whole |= ids | {"media_placeholder_token_id": geometry.special(21)}
    text |= ids | _text_sizes(geometry)
    whole["vision_config"] |= _vision_sizes(geometry)
    ignore = text["quantization_config"]["ignore"]
    if dialect == "k2.5":
        ignore[:] = ["lm_head", *ignore[:3]]
    if dialect == "k2-thinking":
        ignore[:] = [p for p in ignore if "vision" not in p and "mm_projector" not in p]
    return text if dialect == "k2-thinking" else whole


def _text_sizes(g: Geometry) -> dict[str, int]:
    return {
        "hidden_size": g.hidden,
        "num_hidden_layers": g.layers,
        "first_k_dense_replace": g.dense_layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.heads,
        "q_lora_rank": g.q_lora,
        "kv_lora_rank": g.kv_lora,
        "qk_nope_head_dim": g.qk_nope,
        "qk_rope_head_dim": g.qk_rope,
        "v_head_dim": g.v_head,
        "intermediate_size": g.dense_ff,
        "n_routed_experts": g.experts,
        "num_experts_per_tok": g.top_k,
        "moe_intermediate_size": g.moe_ff,
        "n_shared_experts": g.shared_experts,
        "vocab_size": g.vocab,
    }


def _vision_sizes(g: Geometry) -> dict[str, Any]:
    return {
        "init_pos_emb_height": g.pos_height,
        "init_pos_emb_time": g.pos_time,
        "init_pos_emb_width": g.pos_width,
        "merge_kernel_size": [g.merge_height, g.merge_width],
        "mm_hidden_size": g.vit_hidden,
        "patch_size": g.patch,
        "text_hidden_size": g.hidden,
        "vt_hidden_size": g.vit_hidden,
        "vt_intermediate_size": g.vit_ff,
        "vt_num_attention_heads": g.vit_heads,
        "vt_num_hidden_layers": g.vit_layers,
    }
