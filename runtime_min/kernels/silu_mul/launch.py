"""silu(gate) * up: a program for a token and a block of its width."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from runtime_min.kernels.launch import WIDEST, Kernels, Launch, power


@dataclass(frozen=True, slots=True)
class Config:
    block: int = 1024
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows of `width` results."""

    op: ClassVar[str] = "silu_mul"
    width: int

    def default(self, shared: int = WIDEST) -> Config:
        return Config(block=min(1024, power(self.width)))

    def candidates(self) -> list[Config]:
        return [
            Config(block, warps) for block in (256, 512, 1024, 2048) for warps in (1, 2, 4, 8) if block >= 64 * warps
        ]


def silu_mul(kernels: Kernels, gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(tokens, width)
    if not tokens:
        return y
    if gate_up.stride(1) != 1:
        raise ValueError(f"silu_mul: strides {gate_up.stride()}; rows must be contiguous")
    config = kernels.pick(Problem(width))
    grid = (tokens, -(-width // config.block), 1)
    constants = {"F": width, "BLOCK": config.block}
    args = (gate_up, y, gate_up.stride(0))
    kernels.run(Launch(kernel="silu_mul.rows", grid=grid, args=args, constants=constants, warps=config.warps))
    return y
