"""Which blocks of routes go through the experts, and in which tiles."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from runtime_min.kernels.launch import Kernels, Launch
from runtime_min.kernels.moe_int4.ref import MoeShape
from runtime_min.kernels.moe_route.ref import Routing
from specs.storage import int4_slot

SCAN = 1024
# Up to this many tokens what lies between the products is kept in FP32.
EXACT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """One product: `bn` rows of the weights, K in `split` parts."""

    bn: int = 64
    split: int = 1
    warps: int = 4
    stages: int = 3


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

    def default(self) -> Config:
        direct = self.tokens <= 4
        bm = 8 if direct else 16 if self.tokens <= 256 else 32 if self.tokens <= 1024 else 64
        blocks = self.tokens * self.top_k
        return Config(
            direct=direct, bm=bm, wide=self.tokens > EXACT_TOKENS,
            gate_up=self._tile(2 * self.width, self.hidden, self.gate_up, blocks),
            down=self._tile(self.hidden, self.width, self.down, 1 << 30),
        )  # fmt: skip

    def _tile(self, n: int, k: int, tile: tuple[int, int], blocks: int) -> Tile:
        bn = min(64 if self.tokens <= 1024 else 128, tile[0])
        steps, split = k // tile[1], 1
        for s in (2, 4, 7, 14):
            if steps % s == 0 and blocks * (n // bn) * s <= 528:
                split = s
        return Tile(bn=bn, split=split, warps=4 if bn <= 64 else 8)

    def candidates(self) -> list[Config]:
        found = [self.default()]
        wide = self.tokens > EXACT_TOKENS
        for direct, bm in [(True, 8)] * (self.tokens <= 8) + [(False, b) for b in self._blocks()]:
            for bn in (b for b in (32, 64, 128) if self.gate_up[0] % b == 0 and self.down[0] % b == 0):
                for warps in (4, 8):
                    if bn * bm // warps > 4096 or bn // warps < 8:
                        continue
                    for split in self._splits(bn, direct):
                        for stages in (2, 4):
                            up, down = Tile(bn, split, warps, stages), Tile(bn, 1, warps, stages)
                            found.append(Config(direct, bm, wide, up, down))
        return found

    def _blocks(self) -> tuple[int, ...]:
        if self.tokens <= 64:
            return (8, 16)
        return (16, 32) if self.tokens <= 512 else (32, 64) if self.tokens <= 2048 else (64, 128)

    def _splits(self, bn: int, direct: bool) -> list[int]:
        steps = self.hidden // self.gate_up[1]
        if self.tokens > 16:
            return [1]
        return [s for s in (1, 2, 4, 7, 14) if steps % s == 0]


def moe_int4(
    kernels: Kernels, x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, first: int, shape: MoeShape
) -> Tensor:
    tokens, top_k = routing.ids.shape
    out = torch.empty(tokens, shape.hidden, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    if x.stride(1) != 1 or x.stride(0) % 8 or not routing.ids.is_contiguous() or not routing.weights.is_contiguous():
        raise ValueError(f"moe_int4: x has strides {x.stride()}; rows must be contiguous and a multiple of 8 apart")
    here, routes = len(gate_up), tokens * top_k
    config: Config = kernels.pick(
        Problem(shape.hidden, shape.width, here, top_k, rounded(tokens), shape.gate_up, shape.down)
    )
    blocks = _blocks(kernels, config, routing.ids, first, here)
    between = torch.float32 if tokens <= EXACT_TOKENS else x.dtype
    sizes = (2 * shape.width, shape.hidden)
    parts = x.new_empty(config.gate_up.split, routes, sizes[0], dtype=between)
    _product(kernels, config, config.gate_up, x, gate_up, parts, blocks, sizes, shape.gate_up, top_k)
    h = x.new_empty(routes, shape.width)
    args: tuple[Any, ...] = (parts, routing.ids, h, first, routes)
    constants = {"HERE": here, "W": shape.width, "BLOCK": min(1024, power(shape.width)), "SPLIT": config.gate_up.split}
    grid = (routes, -(-shape.width // constants["BLOCK"]), 1)
    kernels.run(Launch(kernel="moe_int4.activate", grid=grid, args=args, constants=constants))
    y = x.new_empty(1, routes, shape.hidden, dtype=between)
    _product(kernels, config, config.down, h, down, y, blocks, (shape.hidden, shape.width), shape.down, 1)
    constants = {"HERE": here, "N": shape.hidden, "TOP_K": top_k, "BLOCK": min(1024, power(shape.hidden))}
    grid = (tokens, -(-shape.hidden // constants["BLOCK"]), 1)
    args = (y, routing.ids, routing.weights, out, first)
    kernels.run(Launch(kernel="moe_int4.add_up", grid=grid, args=args, constants=constants))
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
    room = torch.empty(here + count + 1 + count * config.bm, dtype=torch.int32, device=ids.device)
    counts, experts, number, order = torch.split(room, [here, count, 1, count * config.bm])
    grid = (here, 1, 1)
    kernels.run(
        Launch(kernel="moe_int4.count", grid=grid, args=(ids, counts, first, routes), constants={"BLOCK": SCAN})
    )
    constants = {"E": here, "BE": power(here), "BM": config.bm, "BLOCK": SCAN}
    args = (ids, counts, order, experts, number, first, routes)
    kernels.run(Launch(kernel="moe_int4.table", grid=grid, args=args, constants=constants))
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
    kernels.run(Launch(kernel="moe_int4.product", grid=grid, args=args, constants=constants, warps=tile.warps))


def rounded(tokens: int) -> int:
    return power(tokens)


def power(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
