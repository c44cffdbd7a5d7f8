"""What a call must read, write and multiply, whatever the kernel: the physical limit of every op."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime_min.kernels.cases import nbytes


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
    x, gate_up, down, routing, first, shape = args
    here = routing.ids[(routing.ids >= first) & (routing.ids < first + len(gate_up))]
    slots = 4 * (gate_up.shape[1] + down.shape[1]) * len(torch.unique(here))
    return Work(bytes=slots + nbytes(x) + nbytes(result), flops=6 * here.numel() * shape.width * shape.hidden)


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
