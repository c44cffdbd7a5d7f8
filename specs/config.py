"""config.json of every Kimi K2 dialect -> ModelConfig. Strict: what this family does not cover is refused by field."""

from collections.abc import Mapping
from typing import Any

from specs.dims import ModelConfig, TextDims, TokenIds, VisionDims, Yarn
from specs.errors import ConfigError

GROUP_SIZE = 32
TOP_TYPES = ("kimi_k25", "kimi_k2", "deepseek_v3")

# Fields that must hold exactly this value (or be absent, which means the same).
TEXT_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "attention_bias": False,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "rope_interleave": True,
}
VISION_FIXED: dict[str, Any] = {
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "video_attn_type": "spatial_temporal",
}
QUANT_FIXED: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP_SIZE,
    "dynamic": False,
    "actorder": None,
}
# Fields that change nothing in the tensors or the forward pass of this family.
IGNORED = frozenset(
    [
        "_name_or_path",
        "_attn_implementation",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "auto_map",
        "aux_loss_alpha",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "torch_dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "ep_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "head_dim",
        "id2label",
        "ignore_index",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "quantization_config",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "seq_aux",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
        "use_unified_vision_chunk",
        "video_placeholder",
        "text_config",
        "vision_config",
        "mm_hidden_size",
        "qk_head_dim",
        "video_token_id",
        "image_token_id",
        "vision_start_token_id",
    ]
)


class Fields:
    """One JSON object, read field by field; every problem is kept, and so is every field nobody asked for."""

    def __init__(self, where: str, values: Mapping[str, Any], problems: list[str]) -> None:
        self.where, self.values, self.problems = where, values, problems
        self.seen: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return self.values.get(name, default)

    def number(self, name: str, kind: type[int] | type[float], default: Any = None, low: float = 0) -> Any:
        """An int or float at least `low`; a float field accepts a whole number."""
        value = self.get(name, default)
        good = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not good or isinstance(value, bool) or not value >= low:
            self.problems.append(f"{self.where}.{name}: found {value!r}, expected {kind.__name__} >= {low:g}")
            return kind(1)
        return kind(value)

    def fixed(self, expected: Mapping[str, Any]) -> None:
        for name, value in expected.items():
            found = self.get(name, value)
            if found != value:
                self.problems.append(f"{self.where}.{name}: found {found!r}, only {value!r} is supported")

    def object(self, name: str) -> "Fields":
        value = self.get(name)
        if not isinstance(value, Mapping):
            self.problems.append(f"{self.where}.{name}: found {value!r}, expected an object")
            value = {}
        return Fields(f"{self.where}.{name}", value, self.problems)

    def unknown(self) -> list[str]:
        names = sorted(set(self.values) - self.seen - IGNORED)
        return [f"{self.where}.{n} is not a field of this family; it is ignored" for n in names]


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The model of a parsed config.json; raises ConfigError with every problem at once.

    Nested (`text_config`) and flat files, `rope_scaling` and `rope_parameters`, `dtype` and `torch_dtype`, and
    quantization at either level read to the same thing.
    """
    problems: list[str] = []
    top = Fields("config.json", raw, problems)
    if raw.get("model_type") not in TOP_TYPES:
        raise ConfigError(
            f"config.json.model_type: found {raw.get('model_type')!r}, expected one of {', '.join(TOP_TYPES)}"
        )
    text = top.object("text_config") if "text_config" in raw else top
    dims = _text(text)
    vision = _vision(top.object("vision_config"), dims.hidden) if raw.get("vision_config") else None
    ids = _ids(top, text)
    if top is not text and top.get("tie_word_embeddings", False) is not False:
        problems.append("config.json.tie_word_embeddings: found true, only false is supported")
    _quantization(text if "quantization_config" in text.values else top)
    if problems:
        raise ConfigError(problems)
    return ModelConfig(
        family="kimi_k25",
        text=dims,
        vision=vision,
        ids=ids,
        warnings=tuple(dict.fromkeys(top.unknown() + (text.unknown() if text is not top else []))),
    )


def _text(f: Fields) -> TextDims:
    f.fixed(TEXT_FIXED)
    dims = TextDims(
        hidden=f.number("hidden_size", int, low=1),
        layers=f.number("num_hidden_layers", int, low=1),
        dense_layers=f.number("first_k_dense_replace", int),
        vocab=f.number("vocab_size", int, low=1),
        heads=f.number("num_attention_heads", int, low=1),
        q_lora=f.number("q_lora_rank", int, low=1),
        kv_lora=f.number("kv_lora_rank", int, low=1),
        qk_nope=f.number("qk_nope_head_dim", int, low=1),
        qk_rope=f.number("qk_rope_head_dim", int, low=2),
        v_head=f.number("v_head_dim", int, low=1),
        dense_ff=f.number("intermediate_size", int, low=1),
        experts=f.number("n_routed_experts", int, low=1),
        top_k=f.number("num_experts_per_tok", int, low=1),
        moe_ff=f.number("moe_intermediate_size", int, low=1),
        shared_experts=f.number("n_shared_experts", int, low=1),
        routed_scale=f.number("routed_scaling_factor", float),
        norm_eps=f.number("rms_norm_eps", float),
        context=f.number("max_position_embeddings", int, low=1),
        rope=_rope(f),
    )
    if f.get("num_key_value_heads", dims.heads) != dims.heads:
        f.problems.append(
            f"{f.where}.num_key_value_heads: found {f.get('num_key_value_heads')}, MLA wants {dims.heads}"
        )
    if dims.dense_layers > dims.layers:
        f.problems.append(f"{f.where}.first_k_dense_replace: {dims.dense_layers} is more than {dims.layers} layers")
    if dims.top_k > dims.experts:
        f.problems.append(f"{f.where}.num_experts_per_tok: {dims.top_k} is more than {dims.experts} experts")
    for name, size in (("hidden_size", dims.hidden), ("moe_intermediate_size", dims.moe_ff)):
        if size % GROUP_SIZE:
            f.problems.append(f"{f.where}.{name}: {size} is not a multiple of the INT4 group of {GROUP_SIZE}")
    if dims.qk_rope % 2:
        f.problems.append(f"{f.where}.qk_rope_head_dim: {dims.qk_rope} is odd, rotary pairs want an even number")
    return dims


def _rope(f: Fields) -> Yarn:
    """`rope_scaling` (with `type` or `rope_type`) beside `rope_theta`, or `rope_parameters` with the theta inside."""
    old, new = f.get("rope_scaling"), f.get("rope_parameters")
    theta = f.get("rope_theta")
    both = isinstance(old, Mapping) and isinstance(new, Mapping)
    if both and old and new and any(new.get(k, v) != v for k, v in old.items() if k != "type"):
        f.problems.append(f"{f.where}: rope_scaling and rope_parameters disagree: {old} and {new}")
    if old and new and not both:
        f.problems.append(f"{f.where}: rope_scaling and rope_parameters: expected objects, found {old!r} and {new!r}")
    block = f.object("rope_parameters" if new and not old else "rope_scaling")
    if theta is None:
        theta = block.get("rope_theta")
    block.seen.add("rope_theta")
    kind = block.get("rope_type", block.get("type"))
    block.seen.add("type")
    if kind != "yarn":
        f.problems.append(f"{block.where}.type: found {kind!r}, only 'yarn' is supported")
    if not isinstance(theta, int | float) or theta <= 0:
        f.problems.append(f"{f.where}.rope_theta: found {theta!r}, expected a positive number")
        theta = 1.0
    return Yarn(
        theta=float(theta),
        factor=block.number("factor", float),
        beta_fast=block.number("beta_fast", float),
        beta_slow=block.number("beta_slow", float),
        mscale=block.number("mscale", float),
        mscale_all_dim=block.number("mscale_all_dim", float),
        original=block.number("original_max_position_embeddings", int, low=1),
    )


def _vision(f: Fields, hidden: int) -> VisionDims:
    f.fixed(VISION_FIXED)
    merge = f.get("merge_kernel_size")
    if not isinstance(merge, list) or len(merge) != 2 or not all(isinstance(m, int) and m > 0 for m in merge):
        f.problems.append(f"{f.where}.merge_kernel_size: found {merge!r}, expected two positive integers")
        merge = [1, 1]
    if f.get("text_hidden_size", hidden) != hidden:
        f.problems.append(f"{f.where}.text_hidden_size: found {f.get('text_hidden_size')}, the text model has {hidden}")
    dims = VisionDims(
        vit_hidden=f.number("vt_hidden_size", int, low=1),
        vit_ff=f.number("vt_intermediate_size", int, low=1),
        vit_heads=f.number("vt_num_attention_heads", int, low=1),
        vit_layers=f.number("vt_num_hidden_layers", int, low=1),
        patch=f.number("patch_size", int, low=1),
        pos_height=f.number("init_pos_emb_height", int, low=1),
        pos_width=f.number("init_pos_emb_width", int, low=1),
        pos_time=f.number("init_pos_emb_time", int, low=1),
        merge_height=merge[0],
        merge_width=merge[1],
        text_hidden=hidden,
        projector_eps=f.number("projector_ln_eps", float),
    )
    if dims.vit_hidden % dims.vit_heads:
        f.problems.append(f"{f.where}.vt_hidden_size: {dims.vit_hidden} is not a multiple of {dims.vit_heads} heads")
    return dims


def _ids(top: Fields, text: Fields) -> TokenIds:
    def pick(name: str) -> Any:
        value = top.get(name)
        inner = text.get(name)
        return inner if value is None else value

    eos = pick("eos_token_id")
    return TokenIds(
        bos=pick("bos_token_id"),
        eos=tuple(eos) if isinstance(eos, list) else (eos,),
        pad=pick("pad_token_id"),
        media_placeholder=top.get("media_placeholder_token_id"),
    )


def _quantization(f: Fields) -> None:
    """Refuses everything but compressed-tensors pack-quantized, 4 bits, symmetric, groups of 32."""
    q = f.object("quantization_config")
    if not q.values:
        return
    for name, expected in (("quant_method", "compressed-tensors"), ("format", "pack-quantized")):
        if q.get(name) != expected:
            f.problems.append(f"{q.where}.{name}: found {q.get(name)!r}, only {expected!r} is supported")
    groups = q.object("config_groups")
    if groups.values and len(groups.values) != 1:
        f.problems.append(f"{groups.where}: found {len(groups.values)} groups, only one is supported")
    for name in groups.values:
        group = groups.object(name)
        group.object("weights").fixed(QUANT_FIXED)
        for side in ("input_activations", "output_activations"):
            if group.get(side) is not None:
                f.problems.append(f"{group.where}.{side}: found {group.get(side)!r}, only weights may be quantized")
    if q.get("kv_cache_scheme") is not None:
        f.problems.append(f"{q.where}.kv_cache_scheme: found {q.get('kv_cache_scheme')!r}, only null is supported")
