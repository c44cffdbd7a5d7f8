"""YaRN for training: one table of unit complex numbers a sequence."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rope block of config.json. The amplitude of its tables is 1: mscale and mscale_all_dim agree."""

    theta: float
    factor: float
    original: int
    beta_fast: float
    beta_slow: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """The block of a text or draft config."""
        block = config["rope_scaling"]
        assert block["mscale"] == block["mscale_all_dim"] == 1
        return cls(
            theta=config["rope_theta"],
            factor=block["factor"],
            original=block["original_max_position_embeddings"],
            beta_fast=block["beta_fast"],
            beta_slow=block["beta_slow"],
        )

    def frequencies(self, dim: int) -> Tensor:
        """Radians a position of each of dim / 2 pairs, float64."""

        def pair(beta: float) -> float:
            return dim * math.log(self.original / (beta * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), dim - 1)
        index = torch.arange(dim // 2, dtype=torch.float64)
        plain = self.theta ** (-2 * index / dim)
        ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
        return (1 - ramp) * plain + ramp * plain / self.factor

    def table(self, dim: int, positions: int, device: torch.device, first: int = 0) -> Tensor:
        """[positions, 2, dim / 2] fp32: cosines and sines from position `first` on."""
        return _table(self, dim, positions, device, first)

    def softmax_scale(self, head: int) -> float:
        """head^-0.5 times YaRN's factor squared."""
        return float(head**-0.5 * (0.1 * math.log(self.factor) + 1) ** 2)


# Made once a run: a copy to the device in every step would wait for all the work before it.
@lru_cache(256)
def _table(rope: Rope, dim: int, positions: int, device: torch.device, first: int) -> Tensor:
    at = torch.arange(first, first + positions, dtype=torch.float32)
    angles = at[:, None] * rope.frequencies(dim).to(torch.float32)
    return torch.stack([angles.cos(), angles.sin()], 1).to(device)


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """x [B, S, heads, D] with its pairs of neighbours turned by `table` [S, 2, D / 2], in x's dtype."""
    cos, sin = table[:, None, 0], table[:, None, 1]
    a, b = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)


def rotated_halves(x: Tensor, table: Tensor) -> Tensor:
    """As `rotated`, of pairs (j, j + D / 2)."""
    cos, sin = table[:, None, 0], table[:, None, 1]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
