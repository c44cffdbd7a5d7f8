"""Which product to launch, and how; torch's own where that is faster."""

from dataclasses import dataclass
from functools import cache
from itertools import product as every
from typing import ClassVar

import torch
from torch import Tensor

from runtime_min.aside import away
from runtime_min.kernels.index import KernelError
from runtime_min.kernels.launch import WIDEST, Kernels, Launch, power

# Above this many tokens a block of weights is used often enough for the library's product to be as fast.
MOST_TOKENS = 16
BLOCK_N = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class Config:
    """`torch` leaves the product to the library. `split` blocks share a tile of `bn` rows along K, in steps of `bk`."""

    torch: bool = False
    bn: int = 16
    bk: int = 256
    split: int = 1
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """heads products of [tokens, k] with [n, k]. tokens is rounded up to 1, 2, 4, 8, 16, then powers of two."""

    op: ClassVar[str] = "linear"
    n: int
    k: int
    heads: int
    tokens: int
    across: bool = False
    norm: bool = False
    silu: bool = False

    def default(self, shared: int = WIDEST) -> Config:
        if self.tokens > MOST_TOKENS:
            return Config(torch=True)
        bn = 16 if self.n < 8192 else 32
        tiles = -(-self.n // bn) * self.heads
        bk = min(256, max(32, largest_power(self.k)))
        split = 1
        while tiles * split < 264 and self.k % (2 * split * bk) == 0 and self.k // (2 * split * bk) >= 2:
            split *= 2
        return Config(bn=bn, bk=bk, split=split, warps=2 if bn == 16 else 4, stages=4)

    def candidates(self) -> list[Config]:
        found = [Config(torch=True), self.default()]
        if self.tokens > 128:
            return found
        for bn, bk, split, warps, stages in every(BLOCK_N, (128, 256, 512), (1, 2, 4, 7, 8, 14), (1, 2, 4), (4,)):
            blocks = -(-self.n // bn) * self.heads * split
            if self.k % (bk * split) or not 64 <= blocks <= 4096 or bn * bk * 2 * stages > 160 << 10:
                continue
            if warps * 16 > bn * 2 or (bn == 16 and warps > 2):
                continue
            found.append(Config(bn=bn, bk=bk, split=split, warps=warps, stages=stages))
        return found


def largest_power(k: int) -> int:
    """The largest power of two that divides k."""
    return k & -k


@cache
def scratch(device: torch.device, aside: bool, floats: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Room for partial sums, and counters that are zero between launches. Launches one after another share it; what
    runs aside has its own."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # The zeros would be those of this graph alone, and its memory too.
        raise KernelError("linear: run the work once before its capture; it keeps scratch")
    return torch.empty(floats, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)


def linear(kernels: Kernels, x: Tensor, weight: Tensor, out: torch.dtype | None = None) -> Tensor:
    n, k = weight.shape
    config = kernels.pick(Problem(n, k, 1, power(len(x))))
    if config.torch or len(x) == 0:
        return library(x, weight, out or x.dtype)
    y = x.new_empty(len(x), n, dtype=out or x.dtype)
    _launch(kernels, config, x[:, None], weight[None], y[:, None], None, 0.0)
    return y


def norm_linear(
    kernels: Kernels, x: Tensor, gamma: Tensor, eps: float, weight: Tensor, out: torch.dtype | None = None
) -> Tensor:
    from runtime_min.kernels.rmsnorm.launch import rmsnorm

    n, k = weight.shape
    config = kernels.pick(Problem(n, k, 1, power(len(x)), norm=True))
    if config.torch or len(x) == 0:
        return library(rmsnorm(kernels, x, gamma, eps), weight, out or x.dtype)
    y = x.new_empty(len(x), n, dtype=out or x.dtype)
    _launch(kernels, config, x[:, None], weight[None], y[:, None], gamma, eps)
    return y


def silu_linear(kernels: Kernels, gate_up: Tensor, weight: Tensor) -> Tensor:
    from runtime_min.kernels.silu_mul.launch import silu_mul

    n, k = weight.shape
    config = kernels.pick(Problem(n, k, 1, power(len(gate_up)), silu=True))
    if config.torch or len(gate_up) == 0:
        return library(silu_mul(kernels, gate_up).to(weight.dtype), weight, weight.dtype)
    y = weight.new_empty(len(gate_up), n)
    _launch(kernels, config, gate_up[:, None], weight[None], y[:, None], None, 0.0, silu=True)
    return y


def heads_linear(kernels: Kernels, x: Tensor, weight: Tensor, across: bool = False) -> Tensor:
    heads, n, k = (weight.transpose(1, 2) if across else weight).shape
    config = kernels.pick(Problem(n, k, heads, power(len(x)), across=across))
    if config.torch or len(x) == 0:
        return library_heads(x, weight, across).contiguous()
    y = x.new_empty(len(x), heads, n)
    _launch(kernels, config, x, weight, y, None, 0.0, across=across)
    return y


def library(x: Tensor, weight: Tensor, out: torch.dtype) -> Tensor:
    """x weight^T by torch, adding up in FP32 and giving `out`."""
    if out == x.dtype:
        return x @ weight.T
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=out)
    return x.to(out) @ weight.T.to(out)


def library_heads(x: Tensor, weight: Tensor, across: bool = False) -> Tensor:
    """The product of each head by torch, [T, H, N] in the order that it leaves."""
    return torch.bmm(x.transpose(0, 1), weight if across else weight.transpose(1, 2)).transpose(0, 1)


def _launch(
    kernels: Kernels, config: Config, x: Tensor, weight: Tensor, y: Tensor, gamma: Tensor | None, eps: float,
    across: bool = False, silu: bool = False,
) -> None:  # fmt: skip
    """x [T, H, K or 2 K], weight [H, N, K] (across: [H, K, N]), y [T, H, N]; rows of x may be strided."""
    tokens, heads, n = y.shape
    k = weight.shape[1] if across else weight.shape[2]
    if x.stride(2) != 1 or not weight.is_contiguous() or not y.is_contiguous():
        raise ValueError(
            f"linear: strides {x.stride()}, {weight.stride()}, {y.stride()}; inner axes must be contiguous"
        )
    bm = max(8, min(16, power(tokens)))
    blocks = -(-tokens // bm)
    grid = (-(-n // config.bn), config.split, heads * blocks)
    tiles = grid[0] * grid[2]
    floats = tiles * config.split * (config.bn + 1) * bm if config.split > 1 else 1
    parts, done = scratch(x.device, away(x.device), floats, tiles)
    squares = parts[tiles * config.split * config.bn * bm :] if config.split > 1 else parts
    constants = {
        "N": n, "K": k, "X_ROW": x.stride(0), "X_HEAD": x.stride(1) if heads > 1 else 0, "Y_ROW": y.stride(0),
        "BN": config.bn, "BM": bm, "BK": config.bk, "SPLIT": config.split, "ACROSS": across,
        "NORM": gamma is not None, "SILU": silu, "STAGES": config.stages,
    }  # fmt: skip
    args = (x, gamma if gamma is not None else x, weight, y, parts, squares, done, tokens, eps)
    kernels.run(Launch(kernel="linear.product", grid=grid, args=args, constants=constants, warps=config.warps))
