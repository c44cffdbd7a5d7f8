"""RMSNorm of rows: one program a row, whatever their number."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from runtime_min.kernels.launch import WIDEST, Kernels, Launch, power


@dataclass(frozen=True, slots=True)
class Config:
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows of `hidden` values."""

    op: ClassVar[str] = "rmsnorm"
    hidden: int
    add: bool = False

    def default(self, shared: int = WIDEST) -> Config:
        return Config(warps=8 if self.hidden > 4096 else 4 if self.hidden > 1024 else 1)

    def candidates(self) -> list[Config]:
        return [Config(warps) for warps in (1, 2, 4, 8, 16) if warps * 32 <= self.hidden]


def rmsnorm(kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.new_empty(x.shape)
    _launch(kernels, x, x, weight, y, y, eps, add=False)
    return y


def add_rmsnorm(kernels: Kernels, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, y = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(kernels, x, residual, weight, total, y, eps, add=True)
    return total, y


def _launch(
    kernels: Kernels, x: Tensor, residual: Tensor, weight: Tensor, total: Tensor, y: Tensor, eps: float, add: bool
) -> None:
    """x [T, H] with rows any distance apart, residual contiguous where it is added."""
    tokens, hidden = x.shape
    if not tokens:
        return
    if x.stride(1) != 1 or (add and not residual.is_contiguous()):
        raise ValueError(f"rmsnorm: strides {x.stride()} and {residual.stride()}; rows must be contiguous")
    config = kernels.pick(Problem(hidden, add))
    constants = {"H": hidden, "BLOCK": power(hidden), "ADD": add}
    args = (x, residual, weight, total, y, eps, x.stride(0))
    kernels.run(Launch(kernel="rmsnorm.rows", grid=(tokens, 1, 1), args=args, constants=constants, warps=config.warps))
