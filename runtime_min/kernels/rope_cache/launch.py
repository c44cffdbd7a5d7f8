"""Rotary positions, the latent's norm and the cache write: one program a token."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from runtime_min.kernels.launch import WIDEST, Kernels, Launch, power


@dataclass(frozen=True, slots=True)
class Config:
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Problem:
    op: ClassVar[str] = "rope_cache"
    heads: int
    rope: int
    latent: int

    def default(self, shared: int = WIDEST) -> Config:
        return Config(warps=4 if self.heads > 4 else 2)

    def candidates(self) -> list[Config]:
        return [Config(warps) for warps in (1, 2, 4, 8)]


def rope_cache(
    kernels: Kernels, q_pe: Tensor, k_pe: Tensor, latent: Tensor, gamma: Tensor, eps: float, cos: Tensor, sin: Tensor,
    positions: Tensor, slots: Tensor, rows: Tensor,
) -> Tensor:  # fmt: skip
    tokens, heads, rope = q_pe.shape
    out = q_pe.new_empty(q_pe.shape)
    if not tokens:
        return out
    for name, x in (("q_pe", q_pe), ("k_pe", k_pe), ("latent", latent)):
        if x.stride(-1) != 1:
            raise ValueError(f"rope_cache: {name} has strides {x.stride()}; the last axis must be contiguous")
    width = latent.shape[1]
    config = kernels.pick(Problem(heads, rope, width))
    constants = {
        "H": heads, "BH": power(heads), "R": rope // 2, "BR": power(rope // 2), "L": width, "BL": power(width),
    }  # fmt: skip
    strides = (q_pe.stride(0), q_pe.stride(1), k_pe.stride(0), latent.stride(0))
    args = (q_pe, k_pe, latent, gamma, cos, sin, positions, slots, rows, out, eps, *strides)
    kernels.run(
        Launch(kernel="rope_cache.rows", grid=(tokens, 1, 1), args=args, constants=constants, warps=config.warps)
    )
    return out
