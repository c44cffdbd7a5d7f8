"""Random drafts in the real file format, fitting a demo checkpoint of the same geometry."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from convert.demo.checkpoint import as_json, check_room
from convert.demo.filler import Filler
from convert.demo.geometry import TINY, DemoError, Geometry, template
from convert.demo.inventory import TensorSpec, ffn, in_file_order, linear, norm
from convert.demo.noise import noise, raw, stream
from convert.demo.stream import write_file, write_text

DraftKind = Literal["eagle3-llama", "eagle3-mla", "eagle3.1-mla", "dflash"]
DRAFT_KINDS: tuple[DraftKind, ...] = ("eagle3-llama", "eagle3-mla", "eagle3.1-mla", "dflash")
EMBED = "embed_tokens.weight"
# The name under which a demo checkpoint draws its embedding: a draft's copy is the same numbers for the same seed.
TARGET_EMBED = "language_model.model.embed_tokens.weight"
WINDOW = 2048


def write_draft(
    out: Path,
    kind: DraftKind,
    geometry: Geometry = TINY,
    seed: int = 0,
    *,
    embed: bool = True,
    head: bool = True,
    vocab: int | None = None,
    taps: Sequence[int] | None = None,
    block: int = 8,
    window: int = WINDOW,
) -> None:
    """Writes config.json, LICENSE and model.safetensors of a random draft for a `geometry` target into `out`, which
    must be empty or absent. Same arguments, same bytes.

    kind: the four released shapes. embed, head: whether an EAGLE3 file has its own (DFlash files have neither). vocab:
    the draft's own vocabulary; smaller than the target's it comes with `d2t` and `t2d`, larger it is padded. taps:
    0-based layers of the target whose outputs are read, as config.json states them. block, window: DFlash's block
    size and the reach of its sliding layers. Raises PlanError for an occupied folder, DemoError for unknown kinds.
    """
    if kind not in DRAFT_KINDS:
        raise DemoError(f"demo draft: found {kind!r}, expected one of {', '.join(DRAFT_KINDS)}; choose one of them")
    g, vocab = geometry, vocab or geometry.vocab
    ids = list(taps or usual_taps(kind, g.layers))
    if kind == "dflash":
        stated, specs = _dflash_config(g, ids, block, window), list(_dflash(g, len(ids)))
    else:
        stated, specs = _eagle_config(g, kind, ids, vocab), list(_eagle(g, kind, len(ids), embed, head, vocab))
    specs = in_file_order(specs)
    check_room(out, sum(spec.nbytes for spec in specs))
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "LICENSE", template("LICENSE"))
    write_text(out / "config.json", as_json(stated))
    write_file(out / "model.safetensors", specs, _payloads(specs, g, seed, vocab), lambda n: None)


def usual_taps(kind: DraftKind, layers: int) -> list[int]:
    """The released drafts' layers, moved into a target of so many layers."""
    if kind == "dflash":
        count, last = min(6, layers), max(layers - 3, min(layers, 6) - 1)
        first = 1 if last - 1 >= count - 1 else 0
        return [round(first + i * (last - first) / max(1, count - 1)) for i in range(count)]
    if layers < 4:
        return list(range(layers))
    return [1, layers // 2 - 1, layers - 4] if layers > 7 else [1, layers // 2, layers - 1]


def _rope(kind: DraftKind) -> dict[str, Any]:
    return {
        "type": "deepseek_yarn" if kind == "dflash" else "yarn",
        "factor": 64.0,
        "beta_fast": 1.0 if kind.endswith("mla") else 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }


def _eagle_config(g: Geometry, kind: DraftKind, taps: list[int], vocab: int) -> dict[str, Any]:
    mla = kind != "eagle3-llama"
    sizes = {
        "q_lora_rank": g.q_lora,
        "kv_lora_rank": g.kv_lora,
        "qk_nope_head_dim": g.qk_nope,
        "qk_rope_head_dim": g.qk_rope,
        "v_head_dim": g.v_head,
    }
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
        "model_type": "kimi_k2" if mla else "llama",
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "num_hidden_layers": 1,
        "intermediate_size": g.dense_ff,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.heads,
        **(sizes if mla else {"head_dim": g.qk_nope}),
        "rms_norm_eps": 1e-5 if mla else 1e-6,
        "vocab_size": g.vocab,
        "draft_vocab_size": vocab,
        "rope_theta": 50000.0,
        "rope_scaling": _rope(kind),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": taps,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
        **({"fc_norm": True, "norm_output": True} if kind == "eagle3.1-mla" else {}),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _dflash_heads(g: Geometry) -> tuple[int, int]:
    """Query and KV heads: KV heads as many as ranks may share out, each with a group of queries."""
    kv_heads = min(8, g.heads)
    return max(g.heads, 2 * kv_heads), kv_heads


def _dflash_config(g: Geometry, taps: list[int], block: int, window: int) -> dict[str, Any]:
    heads, kv_heads = _dflash_heads(g)
    layers = _dflash_layers(g)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": g.hidden,
        "num_hidden_layers": layers,
        "intermediate_size": g.dense_ff,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": g.qk_nope,
        "rms_norm_eps": 1e-5,
        "vocab_size": g.vocab,
        "num_target_layers": g.layers,
        "block_size": block,
        "dflash_config": {"mask_token_id": g.special(254), "target_layer_ids": taps},
        "rope_theta": 50000.0,
        "rope_scaling": _rope("dflash"),
        "layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"],
        "sliding_window": window,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _dflash_layers(g: Geometry) -> int:
    return min(6, max(2, g.layers // 10))


def _eagle(g: Geometry, kind: DraftKind, taps: int, embed: bool, head: bool, vocab: int) -> Iterator[TensorSpec]:
    layer = "midlayer" if kind == "eagle3-llama" else "layers.0"
    attn = f"{layer}.self_attn"
    if embed:
        yield TensorSpec(name=EMBED, dtype="BF16", shape=(g.vocab, g.hidden), std=1.0)
    if head:
        yield linear("lm_head", vocab, g.hidden)
    if vocab < g.vocab:
        yield TensorSpec(name="d2t", dtype="I64", shape=(vocab,), kind="table")
        yield TensorSpec(name="t2d", dtype="BOOL", shape=(g.vocab,), kind="table")
    yield linear("fc", g.hidden, taps * g.hidden)
    if kind == "eagle3.1-mla":
        yield from (norm(f"fc_norm.{i}", g.hidden) for i in range(taps))
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield norm(f"{layer}.{name}", g.hidden)
    yield norm("norm", g.hidden)
    if kind == "eagle3-llama":
        for name in ("q_proj", "k_proj", "v_proj"):
            yield linear(f"{attn}.{name}", g.heads * g.qk_nope, 2 * g.hidden)
        yield linear(f"{attn}.o_proj", g.hidden, g.heads * g.qk_nope)
    else:
        yield linear(f"{attn}.q_a_proj", g.q_lora, 2 * g.hidden)
        yield norm(f"{attn}.q_a_layernorm", g.q_lora)
        yield linear(f"{attn}.q_b_proj", g.heads * (g.qk_nope + g.qk_rope), g.q_lora)
        yield linear(f"{attn}.kv_a_proj_with_mqa", g.kv_lora + g.qk_rope, 2 * g.hidden)
        yield norm(f"{attn}.kv_a_layernorm", g.kv_lora)
        yield linear(f"{attn}.kv_b_proj", g.heads * (g.qk_nope + g.v_head), g.kv_lora)
        yield linear(f"{attn}.o_proj", g.hidden, g.heads * g.v_head)
    yield from ffn(f"{layer}.mlp", g.hidden, g.dense_ff)


def _dflash(g: Geometry, taps: int) -> Iterator[TensorSpec]:
    heads, kv_heads = _dflash_heads(g)
    yield linear("fc", g.hidden, taps * g.hidden)
    yield from (norm("hidden_norm", g.hidden), norm("norm", g.hidden))
    for i in range(_dflash_layers(g)):
        layer, attn = f"layers.{i}", f"layers.{i}.self_attn"
        yield from (norm(f"{layer}.input_layernorm", g.hidden), norm(f"{layer}.post_attention_layernorm", g.hidden))
        yield linear(f"{attn}.q_proj", heads * g.qk_nope, g.hidden)
        yield from (linear(f"{attn}.{n}_proj", kv_heads * g.qk_nope, g.hidden) for n in ("k", "v"))
        yield linear(f"{attn}.o_proj", g.hidden, heads * g.qk_nope)
        yield from (norm(f"{attn}.q_norm", g.qk_nope), norm(f"{attn}.k_norm", g.qk_nope))
        yield from ffn(f"{layer}.mlp", g.hidden, g.dense_ff)


def _payloads(specs: Sequence[TensorSpec], g: Geometry, seed: int, vocab: int) -> Iterator[Iterator[memoryview]]:
    """The bytes of each tensor, in the order of `specs`."""
    filler = Filler(seed) if g.weights == "filler" else None
    for spec in specs:
        if spec.kind == "table":
            yield iter((_table(spec, g.vocab, vocab, seed),))
        elif filler is not None:
            yield filler.pieces(spec)
        else:
            yield iter((noise(spec, seed, TARGET_EMBED if spec.name == EMBED else spec.name),))


def _table(spec: TensorSpec, target: int, vocab: int, seed: int) -> memoryview:
    """Which of the target's tokens the draft knows: as differences by draft id, or as a flag for every target id."""
    known = np.sort(stream(seed, "d2t").choice(target, vocab, replace=False))
    if spec.name == "d2t":
        return raw((known - np.arange(vocab)).astype(np.int64))
    return raw(np.isin(np.arange(target), known))
