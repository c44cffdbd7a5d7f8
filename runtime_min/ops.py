"""The kernels that models call, by name: reference or Triton. Model code never asks which it got."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from torch import Tensor

from runtime_min.kernels.gqa import launch as gqa_launch
from runtime_min.kernels.gqa import ref as gqa_ref
from runtime_min.kernels.launch import Kernels
from runtime_min.kernels.linear import launch as linear_launch
from runtime_min.kernels.linear import ref as linear_ref
from runtime_min.kernels.mla_decode import launch as mla_decode_launch
from runtime_min.kernels.mla_decode import ref as mla_decode_ref
from runtime_min.kernels.mla_prefill import launch as mla_prefill_launch
from runtime_min.kernels.mla_prefill import ref as mla_prefill_ref
from runtime_min.kernels.moe_int4 import launch as moe_int4_launch
from runtime_min.kernels.moe_int4 import ref as moe_int4_ref
from runtime_min.kernels.moe_int4.ref import MoeShape
from runtime_min.kernels.moe_route import launch as moe_route_launch
from runtime_min.kernels.moe_route import ref as moe_route_ref
from runtime_min.kernels.moe_route.ref import Routing
from runtime_min.kernels.rmsnorm import launch as rmsnorm_launch
from runtime_min.kernels.rmsnorm import ref as rmsnorm_ref
from runtime_min.kernels.rope_cache import launch as rope_cache_launch
from runtime_min.kernels.rope_cache import ref as rope_cache_ref
from runtime_min.kernels.silu_mul import launch as silu_mul_launch
from runtime_min.kernels.silu_mul import ref as silu_mul_ref
from runtime_min.kernels.vit_attn import launch as vit_attn_launch
from runtime_min.kernels.vit_attn import ref as vit_attn_ref

__all__ = ["REF", "MoeShape", "Ops", "Routing", "triton_ops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One callable an op; arguments, shapes and dtypes are those of the op's ref.py. kernels: who launches them."""

    rmsnorm: Callable[[Tensor, Tensor, float], Tensor]
    add_rmsnorm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    linear: Callable[..., Tensor]
    norm_linear: Callable[..., Tensor]
    silu_linear: Callable[[Tensor, Tensor], Tensor]
    heads_linear: Callable[[Tensor, Tensor, bool], Tensor]
    route: Callable[[Tensor, Tensor, int, float], Routing]
    rope_cache: Callable[..., Tensor]
    mla_decode: Callable[..., Tensor]
    mla_prefill: Callable[..., Tensor]
    moe_int4: Callable[[Tensor, Tensor, Tensor, Routing, int, MoeShape, Tensor, int], Tensor]
    vit_attn: Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]
    gqa: Callable[..., Tensor]
    kernels: Kernels | None = None


REF = Ops(
    rmsnorm=rmsnorm_ref.rmsnorm,
    add_rmsnorm=rmsnorm_ref.add_rmsnorm,
    silu_mul=silu_mul_ref.silu_mul,
    linear=linear_ref.linear,
    norm_linear=linear_ref.norm_linear,
    silu_linear=linear_ref.silu_linear,
    heads_linear=linear_ref.heads_linear,
    route=moe_route_ref.route,
    rope_cache=rope_cache_ref.rope_cache,
    mla_decode=mla_decode_ref.mla_decode,
    mla_prefill=mla_prefill_ref.mla_prefill,
    moe_int4=moe_int4_ref.moe_int4,
    vit_attn=vit_attn_ref.vit_attn,
    gqa=gqa_ref.gqa,
)


def each(ops: Ops, make: Callable[[str], Callable[..., Any]]) -> Ops:
    """`ops` with make(name) in place of every op."""
    made: dict[str, Any] = {f.name: make(f.name) for f in fields(Ops) if f.name != "kernels"}
    return replace(ops, **made)


def triton_ops(kernels: Kernels) -> Ops:
    """Triton ops whose launches `kernels` carries out."""
    return Ops(
        rmsnorm=partial(rmsnorm_launch.rmsnorm, kernels),
        add_rmsnorm=partial(rmsnorm_launch.add_rmsnorm, kernels),
        silu_mul=partial(silu_mul_launch.silu_mul, kernels),
        linear=partial(linear_launch.linear, kernels),
        norm_linear=partial(linear_launch.norm_linear, kernels),
        silu_linear=partial(linear_launch.silu_linear, kernels),
        heads_linear=partial(linear_launch.heads_linear, kernels),
        route=partial(moe_route_launch.route, kernels),
        rope_cache=partial(rope_cache_launch.rope_cache, kernels),
        mla_decode=partial(mla_decode_launch.mla_decode, kernels),
        mla_prefill=partial(mla_prefill_launch.mla_prefill, kernels),
        moe_int4=partial(moe_int4_launch.moe_int4, kernels),
        vit_attn=partial(vit_attn_launch.vit_attn, kernels),
        gqa=gqa_launch.gqa,
        kernels=kernels,
    )
