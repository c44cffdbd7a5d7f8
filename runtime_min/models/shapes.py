"""One rank's text weights by shape alone: to plan kernels without reading, and to bench without a checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime_min.artifact import DTYPES, Artifact, Stored
from specs.dims import TextDims
from specs.mesh import Mesh
from specs.storage import int4_slot, largest_tile

# Two bf16 scales of 2^-9 in a word.
SCALES = 0x3B003B00
Make = Callable[[tuple[int, ...], torch.dtype], Tensor]


def of_artifact(artifact: Artifact, dtype: torch.dtype) -> dict[str, Stored]:
    """Weights of the artifact's rank on the meta device: shapes and dtypes as `Artifact.weights` gives them."""
    return of_entries(artifact.entries, dtype)


def of_entries(entries: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> dict[str, Stored]:
    """The same of a part's index, a target's or a draft's."""
    out: dict[str, Stored] = {}
    rows: dict[str, int] = {}
    for e in entries:
        rows[e["name"]] = rows.get(e["name"], 0) + e["shape"][0]
    for e in entries:
        kept = DTYPES[e["dtype"]] if e["dtype"] != "BF16" else dtype
        tensor = torch.empty((rows[e["name"]], *e["shape"][1:]), dtype=kept, device="meta")
        how = {k: v for k, v in e["layout"].items() if k != "id"}
        out[e["name"]] = Stored(tensor, e["layout"]["id"], how, tuple(tuple(s) for s in e["logical"]))
    return out


def of_dims(d: TextDims, mesh: Mesh, make: Make, dtype: torch.dtype) -> dict[str, Stored]:
    """Weights of one rank of a model of these sizes, made by `make(shape, dtype)`; INT4 slots have dtype int32."""
    heads, vocab = d.heads // mesh.tp, d.vocab // mesh.tp
    dense: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("embed", (vocab, d.hidden), dtype), ("norm", (d.hidden,), dtype), ("head", (vocab, d.hidden), dtype),
    ]  # fmt: skip
    out: dict[str, Stored] = {}
    for i in range(d.layers):
        attention = {
            "input_norm": (d.hidden,), "ffn_norm": (d.hidden,), "attn.qkv_a": (d.q_lora + d.kv_a, d.hidden),
            "attn.q_a_norm": (d.q_lora,), "attn.kv_a_norm": (d.kv_lora,), "attn.q_b": (heads, d.qk_head, d.q_lora),
            "attn.w_uk": (heads, d.qk_nope, d.kv_lora), "attn.w_uv": (heads, d.v_head, d.kv_lora),
            "attn.o": (d.hidden, heads, d.v_head),
        }  # fmt: skip
        dense += [(f"layers.{i}.{n}", shape, dtype) for n, shape in attention.items()]
        if i < d.dense_layers:
            dense += _mlp(f"layers.{i}.mlp", d.hidden, d.dense_ff // mesh.tp, dtype)
            continue
        dense += [(f"layers.{i}.router", (d.experts, d.hidden), dtype)]
        dense += [(f"layers.{i}.router_bias", (d.experts,), torch.float32)]
        dense += _mlp(f"layers.{i}.shared", d.hidden, d.shared_ff // mesh.tp, dtype)
        width, here = d.moe_ff // mesh.etp, d.experts // mesh.ep
        for name, (n, k) in _slots(d, width):
            tile = {"tile_n": largest_tile(n), "tile_k": largest_tile(k)}
            codes, scales, padding = int4_slot(n, k)
            slots = make((here, codes + scales + padding), torch.int32)
            slots[:, codes : codes + scales] = SCALES
            out[f"layers.{i}.experts.{name}"] = Stored(slots, "int4_tile.v1", tile, ((n, k),))
    return out | {n: Stored(make(s, t), "plain.v1", {}, (s,)) for n, s, t in dense}


def _mlp(name: str, hidden: int, width: int, dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(f"{name}.gate_up", (2 * width, hidden), dtype), (f"{name}.down", (hidden, width), dtype)]


def _slots(d: TextDims, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "gate_up", (2 * width, d.hidden)
    yield "down", (d.hidden, width)


def random(device: torch.device) -> Make:
    """Makes values that keep activations near 1: weights of deviation 1 / sqrt(inputs), norms of 1, random codes."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.int32:
            return torch.randint(-(2**31), 2**31 - 1, shape, dtype=dtype, device=device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, shape[-1] ** -0.5)

    return make
