"""YaRN: the frequencies, tables and softmax factor of one rope block."""

import math

import torch
from torch import Tensor

from specs.dims import TextDims, Yarn
from specs.draft import DraftConfig


def correction(yarn: Yarn, dim: int, beta: float) -> float:
    """The pair index whose wavelength fits `beta` times into the original context."""
    return dim * math.log(yarn.original / (beta * 2 * math.pi)) / (2 * math.log(yarn.theta))


def frequencies(yarn: Yarn, dim: int) -> Tensor:
    """Radians per position of each of the dim / 2 pairs, float64: unscaled below the ramp, divided by factor above."""
    low = max(math.floor(correction(yarn, dim, yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn, dim, yarn.beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    plain = yarn.theta ** (-2 * pairs / dim)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return (1 - ramp) * plain + ramp * plain / yarn.factor


def mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def tables(yarn: Yarn, dim: int, positions: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, dim / 2], angles in `dtype` (float32 as the reference has them, or float64).

    Their amplitude is mscale / mscale_all_dim, 1 for this model. YaRN applies at every length.
    """
    amplitude = mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)
    angles = torch.arange(positions, dtype=dtype)[:, None] * frequencies(yarn, dim).to(dtype)
    return angles.cos() * amplitude, angles.sin() * amplitude


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[..., j], x[..., j + D / 2]) by angle j. cos, sin: broadcast to [..., D / 2]."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def softmax_scale(dims: TextDims | DraftConfig) -> float:
    """qk_head^-0.5 times mscale squared: the head's 192 values, not the latent's 576."""
    return float(dims.qk_head**-0.5 * mscale(dims.rope.factor, dims.rope.mscale_all_dim) ** 2)
