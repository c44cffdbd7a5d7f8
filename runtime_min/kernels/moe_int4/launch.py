"""Which blocks of routes go through the experts, and in which tiles."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from runtime_min.kernels.launch import WIDEST, Kernels, Launch, power
from runtime_min.kernels.moe_int4.ref import MoeShape
from runtime_min.kernels.moe_route.ref import Routing
from specs.storage import int4_slot

SCAN = 1024
# Up to this many tokens what lies between the products is kept in FP32.
EXACT_TOKENS = 256


# Programs of experts that begin early sit unevenly on the card: with them a decode step of eight sequences took 10.2 ms
# on an H200, without any overlap 9.5.
_launch = partial(Launch, overlap=False)


@dataclass(frozen=True, slots=True)
class Tile:
    """One product: `bn` rows of the weights, K in `split` parts, or `walk` tiles of rows one after another."""

    bn: int = 64
    split: int = 1
    warps: int = 4
    stages: int = 3
    walk: int = 1


@dataclass(frozen=True, slots=True)
class Config:
    """`direct`: every route is a block, no table. `wide`: scales go onto the weights, rounded to the inputs' dtype."""

    direct: bool
    bm: int
    wide: bool
    gate_up: Tile
    down: Tile


@dataclass(frozen=True, slots=True)
class Problem:
    """Experts [2 width, hidden] and [hidden, width]; tokens rounded up to a power of two."""

    op: ClassVar[str] = "moe_int4"
    hidden: int
    width: int
    here: int
    top_k: int
    tokens: int
    gate_up: tuple[int, int]
    down: tuple[int, int]

    @property
    def shallow(self) -> bool:
        """Is `down` one tile deep? Then it walks over rows and takes SiLU-mul in."""
        return self.width == self.down[1] == 256

    def default(self, shared: int = WIDEST) -> Config:
        few = self.tokens <= EXACT_TOKENS
        bm = 8 if few else 32 if self.tokens <= 2048 else 64
        stages = 4 if few else 2 if self.tokens > 2048 or shared < WIDEST else 4
        split = 4 if self.tokens <= 2 else 2 if self.tokens <= 32 else 1
        while self.hidden // self.gate_up[1] % split:
            split //= 2
        up = Tile(min(128, self.gate_up[0]), split, 4, stages)
        bn = min(128, self.down[0])
        down = Tile(bn, 1, 4, stages, self._walk(bn, 4 if self.tokens <= 2 else 14) if self.shallow else 1)
        return Config(direct=self.tokens <= 4, bm=bm, wide=not few, gate_up=up, down=down)

    def _walk(self, bn: int, most: int) -> int:
        """The largest number of row tiles up to `most` that divides all of them."""
        return next(w for w in range(most, 0, -1) if self.hidden // bn % w == 0)

    def candidates(self) -> list[Config]:
        found = [self.default()]
        steps = self.hidden // self.gate_up[1]
        splits = [s for s in (1, 2, 4, 7) if steps % s == 0 and (s == 1 or self.tokens <= 32)]
        walks = [w for w in (2, 4, 7, 14, 28) if self.hidden // 128 % w == 0] if self.shallow else [1]
        few = [(False, 8, False), (False, 16, False)]
        some = [(False, 16, False), (False, 32, False), (False, 32, True), (False, 64, True)]
        many = [(False, 64, True), (False, 128, True)]
        ways = few if self.tokens <= EXACT_TOKENS else some if self.tokens <= 2048 else many
        for direct, bm, wide in [(True, 8, False)] * (self.tokens <= 8) + ways:
            for warps, stages in ((4, 2), (4, 4)) if bm <= 64 else ((8, 2), (8, 3)):
                for bn in (b for b in (64, 128) if self.gate_up[0] % b == 0 and self.down[0] % b == 0):
                    for split, walk in [(s, walks[-2:][0]) for s in splits] + [(splits[-1], w) for w in walks]:
                        up, down = Tile(bn, split, warps, stages), Tile(bn, 1, warps, stages, walk)
                        found.append(Config(direct, bm, wide, up, down))
        return list(dict.fromkeys(found))


def moe_int4(
    kernels: Kernels, x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, first: int, shape: MoeShape,
    plus: Tensor, at: int,
) -> Tensor:  # fmt: skip
    tokens, top_k = routing.ids.shape
    out = torch.empty(tokens, shape.hidden, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    if x.stride(1) != 1 or x.stride(0) % 8 or not routing.ids.is_contiguous() or not routing.weights.is_contiguous():
        raise ValueError(f"moe_int4: x has strides {x.stride()}; rows must be contiguous and a multiple of 8 apart")
    if not plus.is_contiguous() or at < 0 or at + len(plus) > tokens:
        raise ValueError(f"moe_int4: {list(plus.shape)} rows with strides {plus.stride()} at {at} of {tokens} tokens")
    here, routes = len(gate_up), tokens * top_k
    config: Config = kernels.pick(
        Problem(shape.hidden, shape.width, here, top_k, power(tokens), shape.gate_up, shape.down)
    )
    blocks = _blocks(kernels, config, routing.ids, first, here)
    between = torch.float32 if tokens <= EXACT_TOKENS else x.dtype
    sizes = (2 * shape.width, shape.hidden)
    parts = x.new_empty(config.gate_up.split, routes, sizes[0], dtype=between)
    _product(kernels, config, config.gate_up, x, gate_up, parts, blocks, sizes, shape.gate_up, top_k)
    y = x.new_empty(1, routes, shape.hidden, dtype=between)
    if config.down.walk > 1:
        _narrow(kernels, config, parts, down, y, blocks, shape, x.dtype)
    else:
        h = _activated(kernels, parts, blocks, x.dtype)
        _product(kernels, config, config.down, h, down, y, blocks, (shape.hidden, shape.width), shape.down, 1)
    block = min(1024, power(shape.hidden))
    constants = {"HERE": here, "N": shape.hidden, "TOP_K": top_k, "BLOCK": block}
    grid = (tokens, -(-shape.hidden // block), 1)
    args = (y, routing.ids, routing.weights, plus, out, first, at, len(plus))
    kernels.run(_launch(kernel="moe_int4.add_up", grid=grid, args=args, constants=constants))
    return out


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of routes: at most `count`. Without a table, sorted, experts and number are the ids themselves."""

    ids: Tensor
    sorted: Tensor
    experts: Tensor
    number: Tensor
    first: int
    here: int
    count: int


def _blocks(kernels: Kernels, config: Config, ids: Tensor, first: int, here: int) -> _Blocks:
    routes = ids.numel()
    if config.direct:
        return _Blocks(ids, ids, ids, ids, first, here, routes)
    count = routes // config.bm + min(here, routes)
    # Kernels may count on 16 bytes: every part of the room begins on four words.
    sizes = [-(-n // 4) * 4 for n in (here, count, 1, count * config.bm)]
    room = torch.empty(sum(sizes), dtype=torch.int32, device=ids.device)
    counts, experts, number, order = torch.split(room, sizes)
    grid = (here, 1, 1)
    kernels.run(
        _launch(kernel="moe_int4.count", grid=grid, args=(ids, counts, first, routes), constants={"BLOCK": SCAN})
    )
    constants = {"E": here, "BE": power(here), "BM": config.bm, "BLOCK": SCAN}
    args = (ids, counts, order, experts, number, first, routes)
    kernels.run(_launch(kernel="moe_int4.table", grid=grid, args=args, constants=constants))
    return _Blocks(ids, order, experts, number, first, here, count)


def _product(
    kernels: Kernels, config: Config, tile: Tile, x: Tensor, slots: Tensor, y: Tensor, blocks: _Blocks,
    size: tuple[int, int], layout: tuple[int, int], per_row: int,
) -> None:  # fmt: skip
    """y [split, routes, n] of x [rows, k] and slots [experts here, words]; size (n, k), layout (tile_n, tile_k)."""
    constants = {
        "HERE": blocks.here, "WORDS": sum(int4_slot(*size)), "N": size[0], "K": size[1], "TILE_N": layout[0],
        "TILE_K": layout[1], "BN": tile.bn, "BM": config.bm, "SPLIT": tile.split, "PER_ROW": per_row,
        "DIRECT": config.direct, "WIDE": config.wide, "STAGES": tile.stages,
    }  # fmt: skip
    args = (
        x, slots, y, blocks.ids, blocks.sorted, blocks.experts, blocks.number, blocks.first, y.shape[1], x.stride(0),
    )  # fmt: skip
    grid = (size[0] // tile.bn, tile.split, blocks.count)
    kernels.run(_launch(kernel="moe_int4.product", grid=grid, args=args, constants=constants, warps=tile.warps))


def _activated(kernels: Kernels, parts: Tensor, blocks: _Blocks, dtype: torch.dtype) -> Tensor:
    """silu(gate) * up [routes, width] of parts [split, routes, 2 width]."""
    split, routes, width = parts.shape[0], parts.shape[1], parts.shape[2] // 2
    h = torch.empty(routes, width, dtype=dtype, device=parts.device)
    block = min(1024, power(width))
    args = (parts, blocks.ids, h, blocks.first, routes)
    constants = {"HERE": blocks.here, "W": width, "BLOCK": block, "SPLIT": split}
    grid = (routes, -(-width // block), 1)
    kernels.run(_launch(kernel="moe_int4.activate", grid=grid, args=args, constants=constants))
    return h


def _narrow(
    kernels: Kernels, config: Config, parts: Tensor, slots: Tensor, y: Tensor, blocks: _Blocks, shape: MoeShape,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    tile = config.down
    constants = {
        "BF16": dtype == torch.bfloat16, "HERE": blocks.here, "WORDS": sum(int4_slot(shape.hidden, shape.width)),
        "N": shape.hidden, "TILE_N": shape.down[0], "BN": tile.bn, "BM": config.bm, "ITER": tile.walk,
        "PARTS": len(parts), "DIRECT": config.direct, "WIDE": config.wide, "STAGES": tile.stages,
    }  # fmt: skip
    args = (
        parts, slots, y, blocks.ids, blocks.sorted, blocks.experts, blocks.number, blocks.first, parts.shape[1],
    )  # fmt: skip
    grid = (shape.hidden // (tile.bn * tile.walk), 1, blocks.count)
    kernels.run(_launch(kernel="moe_int4.narrow", grid=grid, args=args, constants=constants, warps=tile.warps))
