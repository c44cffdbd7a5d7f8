"""What a call, or a step of one rank, must read, write and multiply, whatever the kernels: the physical limits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime_min.kernels.cases import nbytes
from specs.dims import TextDims
from specs.mesh import Mesh
from specs.storage import int4_slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes that must pass between memory and chip once, and floating-point operations."""

    bytes: int
    flops: int

    def us(self, gb_s: float, tflops: float) -> float:
        """Microseconds at a card's limits, whichever is slower."""
        return max(self.bytes / gb_s / 1e3, self.flops / tflops / 1e6)


def work(op: str, args: tuple[Any, ...], result: Any) -> Work:
    """The work of one call of an op of Ops."""
    if op in ("linear", "norm_linear", "silu_linear", "heads_linear"):
        weight = args[{"linear": 1, "norm_linear": 3, "silu_linear": 1, "heads_linear": 1}[op]]
        return Work(bytes=_all(args, result), flops=2 * len(args[0]) * weight.numel())
    if op == "moe_int4":
        return _experts(args, result)
    if op in ("mla_decode", "mla_prefill"):
        return _attention(op, args, result)
    if op == "rope_cache":
        # Of the tables and the cache only one row a token is touched.
        q_pe, k_pe, latent = args[:3]
        row = nbytes(k_pe) + nbytes(latent)
        return Work(bytes=2 * nbytes(q_pe) + 2 * row + 4 * nbytes(k_pe), flops=0)
    return Work(bytes=_all(args, result), flops=0)


def _all(args: tuple[Any, ...], result: Any) -> int:
    results = result if isinstance(result, tuple) else (result,)
    return sum(map(nbytes, args)) + sum(map(nbytes, results))


def _experts(args: tuple[Any, ...], result: Tensor) -> Work:
    x, gate_up, down, routing, first, shape, plus, _ = args
    here = routing.ids[(routing.ids >= first) & (routing.ids < first + len(gate_up))]
    slots = 4 * (gate_up.shape[1] + down.shape[1]) * len(torch.unique(here))
    return Work(
        bytes=slots + nbytes(x) + nbytes(plus) + nbytes(result), flops=6 * here.numel() * shape.width * shape.hidden
    )


def _attention(op: str, args: tuple[Any, ...], result: Tensor) -> Work:
    """Every cached row once, every visible (query, token) pair of every head."""
    if op == "mla_decode":
        q, q_pe, rows, _, cu_q, lengths = args[:6]
        sizes, dims = 0, 2 * q.shape[2] + q_pe.shape[2]
    else:
        q, q_pe, w_uk, w_uv, rows, _, cu_q, lengths = args[:8]
        sizes, dims = nbytes(w_uk) + nbytes(w_uv), q.shape[2] + q_pe.shape[2] + w_uv.shape[1]
    queries, cached = (cu_q[1:] - cu_q[:-1]).double(), lengths.double()
    pairs = float((queries * (cached - queries) + queries * (queries + 1) / 2).sum())
    expand = 0.0
    if op == "mla_prefill":
        expand = 2.0 * float(cached.sum()) * w_uk.shape[2] * q.shape[1] * (w_uk.shape[1] + w_uv.shape[1])
    moved = sizes + int(lengths.sum()) * rows.shape[-1] * rows.element_size() + nbytes(q) + nbytes(q_pe)
    return Work(bytes=moved + nbytes(result), flops=int(2 * pairs * q.shape[1] * dims + expand))


def decode_work(d: TextDims, mesh: Mesh, sequences: int, context: int) -> Work:
    """A decode step of one rank: dense weights, the experts that `sequences` tokens choose if they choose evenly, and
    every cached row, each read once; every product, and attention in the latent space."""
    dense, width = _dense(d, mesh), d.moe_ff // mesh.etp
    chosen = d.experts // mesh.ep * (1 - (1 - d.top_k / d.experts) ** sequences)
    slot = 4 * (sum(int4_slot(2 * width, d.hidden)) + sum(int4_slot(d.hidden, width)))
    head = d.vocab // mesh.tp * d.hidden
    cached = d.layers * sequences * context
    moe = (d.layers - d.dense_layers) * chosen * slot
    pairs = cached * (d.heads // mesh.tp) * (d.kv_a + d.kv_lora)
    products = sequences * (dense + head + _routed(d, mesh))
    return Work(bytes=int(2 * (dense + head + cached * d.kv_a) + moe), flops=int(2 * (products + pairs)))


def prefill_flops(d: TextDims, mesh: Mesh, tokens: int) -> float:
    """Floating-point operations of this rank for a prompt: every product but the head's, attention over keys that are
    expanded once, half of the square."""
    pairs = d.layers * (d.heads // mesh.tp) * (d.qk_head + d.v_head) * tokens / 2
    return 2.0 * tokens * (_dense(d, mesh) + _routed(d, mesh) + pairs)


def _dense(d: TextDims, mesh: Mesh) -> int:
    """Weights of this rank that every token meets, but for the head."""
    attention = (d.q_lora + d.kv_a) * d.hidden + d.heads // mesh.tp * (
        d.qk_head * d.q_lora + (d.qk_nope + d.v_head) * d.kv_lora + d.v_head * d.hidden
    )
    moe = d.experts * d.hidden + 3 * d.shared_ff // mesh.tp * d.hidden
    mlp = 3 * d.dense_ff // mesh.tp * d.hidden
    return d.layers * attention + (d.layers - d.dense_layers) * moe + d.dense_layers * mlp


def _routed(d: TextDims, mesh: Mesh) -> float:
    """Weights of this rank's experts that a token meets, if tokens choose evenly."""
    return (d.layers - d.dense_layers) * 3 * d.hidden * d.moe_ff * d.top_k / mesh.world
