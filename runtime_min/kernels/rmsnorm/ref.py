"""RMSNorm, by definition."""

from torch import Tensor

from runtime_min.kernels.wide import wide


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] -> x / sqrt(mean(x^2) + eps) * weight [T, H] in x's dtype.

    The normed row is rounded to x's dtype before the weight multiplies it, as the published model does.
    """
    w = x.to(wide(x))
    normed = w * (w.square().mean(-1, keepdim=True) + eps).rsqrt()
    return normed.to(x.dtype) * weight


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(sum, rmsnorm(sum)) of sum = residual + x, both [T, H]; the sum is rounded to x's dtype first."""
    total = residual + x
    return total, rmsnorm(total, weight, eps)
