"""Attention within each picture or clip on a GPU: our own kernel, or torch's after a rotary kernel of ours.

torch's own choice is a kernel that takes 1.7 times as long as cuDNN's, which takes head 72 as 128; ours takes it as
64 + 16, and has the columns that are left over do part of the softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from runtime_min.kernels.launch import LOG2E, WIDEST, Kernels, Launch, power
from runtime_min.runs import runs

ROPE_ROWS = 32
# Problems are told apart by the length of the longest item, rounded up to one of these.
LENGTHS = tuple(1 << i for i in range(8, 16))


@dataclass(frozen=True, slots=True)
class Config:
    """`torch` leaves attention to the library. Tiles of `bm` queries by `bn` keys; `ahead` and `tma` as in kernel.py.
    registers: the most of a thread, so that two tiles share a multiprocessor; 0 leaves it to the compiler."""

    torch: bool = False
    bm: int = 128
    bn: int = 64
    warps: int = 8
    stages: int = 3
    ahead: bool = False
    tma: bool = True
    registers: int = 128


@dataclass(frozen=True, slots=True)
class Problem:
    """Heads of size `head`, the longest item. item: bytes of an element."""

    op: ClassVar[str] = "vit_attn"
    heads: int
    head: int
    longest: int
    item: int = 2

    def default(self, shared: int = WIDEST) -> Config:
        return Config(torch=True)

    def candidates(self) -> list[Config]:
        if self.item != 2:
            return [Config(torch=True)]
        ours = [
            (128, 64, 8, 3, False, True, 128), (128, 64, 8, 2, False, True, 128), (256, 64, 16, 3, False, True, 128),
            (128, 64, 8, 3, False, False, 128), (128, 64, 8, 3, False, False, 0),
        ]  # fmt: skip
        return [Config(torch=True), *(Config(False, *c) for c in ours)]


def problem(qkv: Tensor, lengths: Sequence[int]) -> Problem:
    _, _, heads, head = qkv.shape
    longest = min(max(power(max(lengths)), LENGTHS[0]), LENGTHS[-1])
    return Problem(heads, head, longest, qkv.element_size())


def vit_attn(kernels: Kernels, qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
    """As in ref.py; qkv is overwritten."""
    if not len(qkv):
        return qkv.new_empty(0, *qkv.shape[2:])
    if not qkv.is_contiguous() or not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError(f"vit_attn: strides {qkv.stride()}, {cos.stride()}, {sin.stride()}; all must be contiguous")
    config = kernels.pick(problem(qkv, lengths))
    if config.torch:
        return library(kernels, qkv, cos, sin, lengths)
    return own(kernels, config, qkv, cos, sin, tuple(lengths))


def own(
    kernels: Kernels, config: Config, qkv: Tensor, cos: Tensor, sin: Tensor, lengths: tuple[int, ...]
) -> Tensor:  # fmt: skip
    """By our kernel: all items in one launch."""
    patches, _, heads, head = qkv.shape
    low = max(16, power(head + 1) // 2)
    rest = max(16, power(max(0, head - low) + 1))
    places, table = places_tiles(lengths, config.bm, config.bn, qkv.device)
    padded = len(places)
    lows, rests = (qkv.new_empty(3, heads, padded, width) for width in (low, rest))
    sizes = {"H": heads, "D": head, "L": low, "R": rest}
    args = (qkv, cos, sin, places, lows, rests, padded, head**-0.5 * LOG2E)
    grid = (-(-3 * heads * padded // ROPE_ROWS), 1, 1)
    constants = sizes | {"ROWS": ROPE_ROWS}
    kernels.run(Launch(kernel="vit_attn.pack", grid=grid, args=args, constants=constants, warps=4))
    out = qkv.new_empty(patches, heads, head)
    constants = sizes | {
        "BM": config.bm, "BN": config.bn, "AHEAD": config.ahead, "STAGES": config.stages, "TMA": config.tma,
    }  # fmt: skip
    kernels.run(
        Launch(
            kernel="vit_attn.attend", grid=(len(table), heads, 1), args=(lows, rests, table, out, padded),
            constants=constants, warps=config.warps, registers=config.registers,
        )
    )  # fmt: skip
    return out


@lru_cache(maxsize=64)
def places_tiles(lengths: tuple[int, ...], bm: int, bn: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Items padded to whole tiles of queries and blocks of keys: the patch at every place, -1 for none; and of every
    tile, those of long items first, (where its item begins, padded and not, the item's length, the tile's first query).
    Kept, as all layers of a tower ask for the same."""
    places: list[int] = []
    tiles: list[tuple[int, ...]] = []
    start = 0
    for length in lengths:
        tiles += [(len(places), start, length, first) for first in range(0, length, bm)]
        places += [*range(start, start + length), *[-1] * (-length % max(bm, bn))]
        start += length
    tiles.sort(key=lambda t: -t[2])
    made = partial(torch.tensor, dtype=torch.int32, device=device)
    return made(places), made(tiles)


def library(kernels: Kernels, qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
    """By torch's attention: one call for each stretch of items of equal length."""
    rope(kernels, qkv, cos, sin)
    out = []
    for start, count, length in runs(lengths, int):
        mine = qkv[start : start + count * length].view(count, length, *qkv.shape[1:])
        q, k, v = (x.transpose(1, 2) for x in mine.unbind(2))
        out.append(attend(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]


def rope(kernels: Kernels, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates queries and keys of qkv [P, 3, H, D] in place."""
    patches, _, heads, head = qkv.shape
    count = 2 * patches * heads
    constants = {"H": heads, "R": head // 2, "BR": power(head // 2), "ROWS": ROPE_ROWS}
    args = (qkv, cos, sin, count)
    grid = (-(-count // ROPE_ROWS), 1, 1)
    kernels.run(Launch(kernel="vit_attn.rope", grid=grid, args=args, constants=constants, warps=4))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention without a mask, [B, H, L, D]: cuDNN's where it takes these, else what torch picks."""
    if q.is_cuda and can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, False)):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v)
    return scaled_dot_product_attention(q, k, v)
