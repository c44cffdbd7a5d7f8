"""The drafts' sizes, config.json, weights and stored names: EAGLE3.1 over MLA, EAGLE3 over dense attention, DFlash."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from convert.demo.geometry import Geometry
from convert.demo.training.params import Params, Row
from convert.demo.training.rope import Rope

Kind = Literal["eagle3_mla", "eagle3_llama", "dflash"]
TAPS = (1, 2, 3)
FF = 128
HEAD_DIM = 32
BLOCK = 8
WINDOW = 128
DFLASH_LAYERS = 2
OWN_VOCAB = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One draft for a target of `geometry`. `config` is its config.json; rope and eps are read from there."""

    kind: Kind
    geometry: Geometry
    config: Mapping[str, Any]

    @property
    def rope(self) -> Rope:
        return Rope.of(self.config)

    @property
    def eps(self) -> float:
        return float(self.config["rms_norm_eps"])


def drafts(g: Geometry, text: Mapping[str, Any]) -> dict[str, Draft]:
    """The three by name. text: the target's text_config."""
    scaling = dict(text["rope_scaling"])
    common = {
        "hidden_size": g.hidden,
        "intermediate_size": FF,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.heads,
        "hidden_act": "silu",
        "vocab_size": g.vocab,
        "rope_theta": text["rope_theta"],
        "rope_scaling": scaling,
        "max_position_embeddings": text["max_position_embeddings"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    made: dict[Kind, dict[str, Any]] = {
        "eagle3_mla": _mla(g) | {"rope_scaling": scaling | {"beta_fast": 1.0}},
        "eagle3_llama": _llama(),
        "dflash": _dflash(g),
    }
    return {kind: Draft(kind=kind, geometry=g, config=common | config) for kind, config in made.items()}


AUX = {
    "eagle_aux_hidden_state_layer_ids": list(TAPS),
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def _mla(g: Geometry) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": 1,
        "q_lora_rank": g.q_lora,
        "kv_lora_rank": g.kv_lora,
        "qk_nope_head_dim": g.qk_nope,
        "qk_rope_head_dim": g.qk_rope,
        "v_head_dim": g.v_head,
        "rms_norm_eps": 1e-5,
        "eagle_config": AUX,
        "fc_norm": True,
        "norm_output": True,
    }


def _llama() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": HEAD_DIM,
        "draft_vocab_size": OWN_VOCAB,
        "rms_norm_eps": 1e-6,
        "eagle_config": AUX,
    }


def _dflash(g: Geometry) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DFLASH_LAYERS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "num_target_layers": g.layers,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": g.special(254), "target_layer_ids": list(TAPS), "causal": False},
        "layer_types": ["sliding_attention"] * (DFLASH_LAYERS - 1) + ["full_attention"],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    }


def rows(draft: Draft) -> list[Row]:
    """Every trained weight of the draft."""
    g, h, heads = draft.geometry, draft.geometry.hidden, draft.geometry.heads
    dense = heads * HEAD_DIM
    out = [_matrix("fc", (h, len(TAPS) * h)), Row("hidden_norm", (h,), mean=1.0), Row("norm", (h,), mean=1.0)]
    if draft.kind == "dflash":
        n = DFLASH_LAYERS
        out += [_matrix(f"attn.{m}", (n, dense, h)) for m in "qkv"] + [_matrix("attn.o", (n, h, dense), 0.5)]
        out += [Row(f"attn.{m}_norm", (n, HEAD_DIM), 1, mean=1.0) for m in "qk"]
        out += [Row(f"{m}_norm", (n, h), 1, mean=1.0) for m in ("input", "ffn")]
        return out + _ffn((n,), h)
    out += [Row("input_norm", (h,), mean=1.0), Row("ffn_norm", (h,), mean=1.0), *_ffn((), h)]
    if draft.kind == "eagle3_llama":
        out += [_matrix(f"attn.{m}", (dense, 2 * h)) for m in "qkv"]
        return [*out, _matrix("attn.o", (h, dense), 0.5), Row("head", (OWN_VOCAB, h), std=0.02)]
    return [
        *out,
        Row("fc_norm", (len(TAPS), h), 1, mean=1.0),
        _matrix("attn.q_a", (g.q_lora, 2 * h)),
        Row("attn.q_a_norm", (g.q_lora,), mean=1.0),
        _matrix("attn.q_b", (heads * (g.qk_nope + g.qk_rope), g.q_lora)),
        _matrix("attn.kv_a", (g.kv_lora + g.qk_rope, 2 * h)),
        Row("attn.kv_a_norm", (g.kv_lora,), mean=1.0),
        _matrix("attn.kv_b", (heads * (g.qk_nope + g.v_head), g.kv_lora)),
        _matrix("attn.o", (h, heads * g.v_head), 0.5),
    ]


def _matrix(name: str, shape: tuple[int, ...], gain: float = 1.0) -> Row:
    return Row(name, shape, len(shape) - 2, gain * shape[-1] ** -0.5)


def _ffn(leading: tuple[int, ...], hidden: int) -> list[Row]:
    return [
        _matrix("mlp.gate", (*leading, FF, hidden)),
        _matrix("mlp.up", (*leading, FF, hidden)),
        _matrix("mlp.down", (*leading, hidden, FF), 0.5),
    ]


LAYER = {
    "input_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn.q_a": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm", "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa", "attn.kv_a_norm": "self_attn.kv_a_layernorm",
    "attn.kv_b": "self_attn.kv_b_proj", "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj", "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}  # fmt: skip


def stored(draft: Draft, params: Mapping[str, Tensor], own: Tensor | None) -> dict[str, Tensor]:
    """The draft's tensors by their names in the file. own: the target's ids of the draft's vocabulary, rising."""
    p = {n: w.detach().to("cpu", torch.bfloat16) for n, w in params.items()}
    out: Params = {f"{n}.weight": p.pop(n) for n in ("fc", "norm")}
    if "head" in p:
        assert own is not None
        out["lm_head.weight"] = p.pop("head")
        out["d2t"] = own.cpu() - torch.arange(len(own))
    if "fc_norm" in p:
        out |= {f"fc_norm.{i}.weight": t for i, t in enumerate(p.pop("fc_norm"))}
    if draft.kind == "dflash":
        out["hidden_norm.weight"] = p.pop("hidden_norm")
        for here, stack in p.items():
            out |= {f"layers.{i}.{LAYER[here]}.weight": t for i, t in enumerate(stack)}
    else:
        at = "midlayer" if draft.kind == "eagle3_llama" else "layers.0"
        out[f"{at}.hidden_norm.weight"] = p.pop("hidden_norm")
        out |= {f"{at}.{LAYER[here]}.weight": t for here, t in p.items()}
    return {n: t.contiguous() for n, t in out.items()}
