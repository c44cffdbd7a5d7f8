"""The known drafts by their sizes beside a target's, and one rank's weights of a draft by shape alone."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from runtime_min.artifact import Stored
from runtime_min.models.shapes import Make
from specs.dims import TextDims
from specs.draft import DraftConfig
from specs.mesh import Mesh

# Sizes of DFlash beside those of its target.
LAYERS, BLOCK, WINDOW, KV_HEADS = 6, 8, 2048, 8


def known(d: TextDims) -> dict[str, DraftConfig]:
    """The released kinds of drafts, in the target's own proportions. Which layers they read costs nothing and is left
    at the first ones."""
    eagle = DraftConfig(
        kind="eagle3_mla", hidden=d.hidden, layers=1, heads=d.heads, kv_heads=0, head_dim=0, ff=d.dense_ff,
        vocab=d.vocab, embed_vocab=d.vocab, target_hidden=d.hidden, q_lora=d.q_lora, kv_lora=d.kv_lora,
        qk_nope=d.qk_nope, qk_rope=d.qk_rope, v_head=d.v_head, norm_eps=1e-5, rope=replace(d.rope, beta_fast=1.0),
        taps=(0, 1, 2), taps_said="for its cost alone", windows=(0,), causal=(True,),
    )  # fmt: skip
    dense = replace(eagle, q_lora=0, kv_lora=0, qk_nope=0, qk_rope=0, v_head=0, head_dim=d.qk_nope, rope=d.rope)
    return {
        "eagle3-mla": eagle,
        "eagle3.1-mla": replace(eagle, fc_norm=True, norm_output=True),
        "eagle3-llama": replace(dense, kind="eagle3_llama", kv_heads=d.heads, ff=2 * d.dense_ff // 3),
        "dflash": replace(
            dense, kind="dflash", layers=LAYERS, kv_heads=min(KV_HEADS, d.heads), taps=tuple(range(LAYERS)),
            block=BLOCK, mask_id=0, windows=(WINDOW,) * (LAYERS - 1) + (0,), causal=(False,) * LAYERS,
        ),
    }  # fmt: skip


def of_draft_dims(d: DraftConfig, mesh: Mesh, make: Make, dtype: torch.dtype) -> dict[str, Stored]:
    """Weights of one rank of a draft of these sizes, made by `make(shape, dtype)`; an EAGLE3 draft has a head of its
    own."""
    shapes = dict(_flash(d, mesh.tp) if d.kind == "dflash" else _eagle(d, mesh.tp))
    return {name: Stored(make(shape, dtype), "plain.v1", {}, (shape,)) for name, shape in shapes.items()}


def _eagle(d: DraftConfig, tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, hidden = d.heads // tp, d.hidden
    yield from ((name, (hidden,)) for name in ("embed_norm", "hidden_norm", "ffn_norm", "norm"))
    yield from ((f"fc_norms.{i}", (d.target_hidden,)) for i in range(d.fc_norms))
    yield "fc", (hidden, d.states)
    yield "head", (d.vocab // tp, hidden)
    if d.kind == "eagle3_mla":
        yield "attn.qkv_a", (d.q_lora + d.kv_a, d.pair)
        yield "attn.q_a_norm", (d.q_lora,)
        yield "attn.kv_a_norm", (d.kv_lora,)
        yield "attn.q_b", (heads, d.qk_head, d.q_lora)
        yield "attn.w_uk", (heads, d.qk_nope, d.kv_lora)
        yield "attn.w_uv", (heads, d.v_head, d.kv_lora)
        yield "attn.o", (hidden, heads, d.v_head)
    else:
        yield "attn.qkv", ((heads + 2 * d.kv_heads // tp) * d.head_dim, d.pair)
        yield "attn.o", (hidden, heads * d.head_dim)
    yield from _mlp("mlp", d, tp)


def _flash(d: DraftConfig, tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, kv_heads = d.heads // tp, d.kv_heads // tp
    yield "fc", (d.hidden, d.states)
    yield from ((name, (d.hidden,)) for name in ("hidden_norm", "norm"))
    for i in range(d.layers):
        n = f"layers.{i}"
        yield from ((f"{n}.{name}", (d.hidden,)) for name in ("input_norm", "ffn_norm"))
        yield from ((f"{n}.attn.{name}", (d.head_dim,)) for name in ("q_norm", "k_norm"))
        yield f"{n}.attn.q", (heads * d.head_dim, d.hidden)
        yield f"{n}.attn.kv", (2 * kv_heads * d.head_dim, d.hidden)
        yield f"{n}.attn.o", (d.hidden, heads * d.head_dim)
        yield from _mlp(f"{n}.mlp", d, tp)


def _mlp(name: str, d: DraftConfig, tp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_up", (2 * d.ff // tp, d.hidden)
    yield f"{name}.down", (d.hidden, d.ff // tp)
