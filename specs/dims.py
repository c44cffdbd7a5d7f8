"""Sizes of one model, read from its config.json and cross-checked. Specs refer to these fields by name."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """The rope block. `theta` in radians' base; `original` in tokens. Source: YaRN (arXiv 2309.00071)."""

    theta: float
    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


class Mla:
    """Widths that follow from the sizes of multi-head latent attention."""

    __slots__ = ()
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int

    @property
    def qk_head(self) -> int:
        return self.qk_nope + self.qk_rope

    @property
    def qk_nope_v(self) -> int:
        return self.qk_nope + self.v_head

    @property
    def kv_a(self) -> int:
        """Values cached per token and layer: the latent and the shared rotary key."""
        return self.kv_lora + self.qk_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDims(Mla):
    """The text decoder: MLA attention, `dense_layers` dense layers, then mixture-of-experts layers."""

    hidden: int
    layers: int
    dense_layers: int
    vocab: int
    heads: int
    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    dense_ff: int
    experts: int
    top_k: int
    moe_ff: int
    shared_experts: int
    routed_scale: float
    norm_eps: float
    context: int
    rope: Yarn

    @property
    def shared_ff(self) -> int:
        return self.moe_ff * self.shared_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionDims:
    """MoonViT and the projector."""

    vit_hidden: int
    vit_ff: int
    vit_heads: int
    vit_layers: int
    patch: int
    pos_height: int
    pos_width: int
    pos_time: int
    merge_height: int
    merge_width: int
    text_hidden: int
    projector_eps: float

    @property
    def rgb(self) -> int:
        return 3

    @property
    def vit_qkv(self) -> int:
        return 3 * self.vit_hidden

    @property
    def merged(self) -> int:
        return self.vit_hidden * self.merge_height * self.merge_width


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Special ids as config.json states them."""

    bos: int
    eos: tuple[int, ...]
    pad: int | None
    media_placeholder: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What config.json says, whatever dialect it was written in."""

    family: Literal["kimi_k25"]
    text: TextDims
    vision: VisionDims | None
    ids: TokenIds
    warnings: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, TextDims | VisionDims | None]:
        """Sizes by the parts of the spec; None is a part that this model does not have."""
        return {"text": self.text, "vision": self.vision}
