"""INT4 in groups of 32, as the checkpoint stores it and as training feels it."""

from typing import Any

import torch
from torch import Tensor

from convert.demo.geometry import GROUP

LEVELS = 7


def codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., O, I] fp32 -> codes [..., O, I / 32, 32] fp32 in -8..7, scales [..., O, I / 32, 1] bf16.

    A group's largest magnitude is seven steps; a group of zeros has the smallest normal scale.
    """
    groups = weight.float().reshape(*weight.shape[:-1], -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / LEVELS).clamp_min(torch.finfo(torch.bfloat16).tiny)
    scale = scale.to(torch.bfloat16)
    return (groups / scale.float()).round().clamp(-8, 7), scale


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> weight_packed [O, I / 8] int32, weight_scale [O, I / 32] bf16, as the file holds them."""
    whole, scale = codes(weight)
    nibbles = (whole.to(torch.int64) + 8).view(len(weight), -1, 8)
    shifts = torch.arange(0, 32, 4, device=weight.device)
    words = (nibbles << shifts).sum(-1)
    # Two's complement: the upper half of the unsigned words is negative.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32), scale.squeeze(-1)


class _Int4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        whole, scale = codes(weight)
        return (whole * scale.float()).flatten(-2).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].float(), None


def int4(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """What a reader of the file makes of `weight`, in `dtype`; gradients pass as if nothing was rounded."""
    out: Tensor = _Int4.apply(weight, dtype)  # type: ignore[no-untyped-call]
    return out


def bf16(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` rounded to the stored BF16, in `dtype`."""
    return weight.to(torch.bfloat16).to(dtype)
