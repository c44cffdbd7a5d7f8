"""Attention within each picture or clip, on a GPU: by a kernel of ours, or by torch's own after the same rotary kernel.

Both are measured by `python -m runtime_min.bench.vision`; `runtime_min/ops.py` says which one models get.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from runtime_min.kernels.launch import LOG2E, WIDEST, Kernels, Launch, power
from runtime_min.runs import runs

LEAST = 16
ROPE_ROWS = 32
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles of `bm` queries by `bn` keys."""

    bm: int = 128
    bn: int = 64
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """Heads of size `head`. `item`: bytes of an element."""

    op: ClassVar[str] = "vit_attn"
    heads: int
    head: int
    item: int = 2

    def default(self, shared: int = WIDEST) -> Config:
        if self.item != 2:
            return Config(bm=64, bn=32, warps=4, stages=1)
        return Config() if shared >= WIDEST else Config(stages=2)

    def candidates(self) -> list[Config]:
        tiles = [(128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (256, 64, 8)]
        return [Config(m, n, w, s) for m, n, w in tiles for s in (2, 3, 4)]


def vit_attn(kernels: Kernels, qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
    """As in ref.py; qkv is overwritten."""
    patches, _, heads, head = qkv.shape
    out = qkv.new_empty(patches, heads, head)
    if not patches:
        return out
    rope(kernels, qkv, cos, sin)
    config = kernels.pick(Problem(heads, head, qkv.element_size()))
    table = tiles(tuple(lengths), config.bm, qkv.device)
    whole = max(LEAST, power(head + 1) // 2)
    rest = max(LEAST, power(head - whole)) if head > whole else 0
    constants = {
        "H": heads, "D": head, "BA": whole, "BB": rest, "BM": config.bm, "BN": config.bn, "STAGES": config.stages,
    }  # fmt: skip
    args = (qkv, table, out, head**-0.5 * LOG2E)
    grid = (len(table), heads, 1)
    kernels.run(Launch(kernel="vit_attn.attend", grid=grid, args=args, constants=constants, warps=config.warps))
    return out


def rope(kernels: Kernels, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates queries and keys of qkv [P, 3, H, D] in place."""
    patches, _, heads, head = qkv.shape
    if not qkv.is_contiguous() or not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError(f"vit_attn: strides {qkv.stride()}, {cos.stride()}, {sin.stride()}; all must be contiguous")
    count = 2 * patches * heads
    constants = {"H": heads, "R": head // 2, "BR": power(head // 2), "ROWS": ROPE_ROWS}
    args = (qkv, cos, sin, count)
    grid = (-(-count // ROPE_ROWS), 1, 1)
    kernels.run(Launch(kernel="vit_attn.rope", grid=grid, args=args, constants=constants, warps=4))


@lru_cache(maxsize=16)
def tiles(lengths: tuple[int, ...], bm: int, device: torch.device) -> Tensor:
    """TILES of the kernel: all tiles of all items. Kept, for every layer of a pass asks for the same."""
    rows, first = [], 0
    for length in lengths:
        rows += [(first, length, at) for at in range(0, length, bm)]
        first += length
    return torch.tensor(rows, dtype=torch.int32).to(device)


def by_torch(kernels: Kernels, qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
    """The same by scaled_dot_product_attention: one call for each stretch of items of equal length."""
    rope(kernels, qkv, cos, sin)
    return within_items(qkv, lengths)


def within_items(qkv: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attention [P, H, D] within each item of rotated qkv [P, 3, H, D]."""
    out = []
    with sdpa_kernel(BACKENDS, set_priority=True):
        for start, count, length in runs(lengths, int):
            mine = qkv[start : start + count * length].view(count, length, *qkv.shape[1:])
            q, k, v = (x.transpose(1, 2) for x in mine.unbind(2))
            out.append(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]
