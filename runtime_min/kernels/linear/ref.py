"""Dense products with what comes before them fused in, by definition."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from runtime_min.kernels.wide import wide


def linear(x: Tensor, weight: Tensor, out: torch.dtype | None = None) -> Tensor:
    """x [T, K], weight [N, K] -> x weight^T [T, N] in `out`, by default x's dtype. Products add up in FP32 at least."""
    return (x.to(wide(x)) @ weight.to(wide(x)).T).to(out or x.dtype)


def norm_linear(x: Tensor, gamma: Tensor, eps: float, weight: Tensor, out: torch.dtype | None = None) -> Tensor:
    """linear(rmsnorm(x, gamma, eps), weight) without rounding the normed row. gamma [K]."""
    w = x.to(wide(x))
    normed = w * (w.square().mean(-1, keepdim=True) + eps).rsqrt() * gamma.to(w.dtype)
    return (normed @ weight.to(w.dtype).T).to(out or x.dtype)


def silu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """gate_up [T, 2 K], gate before up; weight [N, K] -> (silu(gate) * up) weight^T [T, N] in the dtype of weight,
    unrounded between."""
    gate, up = gate_up.to(wide(gate_up)).chunk(2, -1)
    return ((silu(gate) * up) @ weight.to(gate.dtype).T).to(weight.dtype)


def heads_linear(x: Tensor, weight: Tensor, across: bool = False) -> Tensor:
    """x [T, H, K], weight [H, N, K], or [H, K, N] `across` -> [T, H, N]: every head its own product."""
    w = weight.to(wide(x))
    return torch.einsum("thk,hkn->thn" if across else "thk,hnk->thn", x.to(w.dtype), w).to(x.dtype)
