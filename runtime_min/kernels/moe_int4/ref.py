"""Routed experts with INT4 weights, by definition: dequantized in FP32 without rounding, one expert after another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime_min.kernels.layouts.int4_tile import Int4Tile
from runtime_min.kernels.moe_route.ref import Routing
from runtime_min.kernels.silu_mul.ref import silu_mul
from runtime_min.kernels.wide import wide


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """What the words of an expert's slots are: gate_up [2 width, hidden] and down [hidden, width] in int4_tile with
    (tile_n, tile_k) each."""

    hidden: int
    width: int
    gate_up: tuple[int, int]
    down: tuple[int, int]


def moe_int4(
    x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, first: int, shape: MoeShape, plus: Tensor, at: int
) -> Tensor:
    """Weighted sum [T, hidden] over the chosen experts that are here, in x's dtype, and `plus` on rows at, at + 1, ...

    x [T, hidden]; gate_up and down [experts here, slot words] int32 hold experts first, first + 1, ...; experts that
    a token chose elsewhere add nothing. plus [up to T - at, hidden]: what the shared expert gives.
    """
    total = torch.zeros(x.shape, dtype=wide(x), device=x.device)
    for expert in range(len(gate_up)):
        token, choice = (routing.ids == first + expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        wide_x = x[token].to(total.dtype)
        h = silu_mul(wide_x @ dequantized(gate_up[expert], (2 * shape.width, shape.hidden), shape.gate_up, x).T)
        y = h @ dequantized(down[expert], (shape.hidden, shape.width), shape.down, x).T
        total.index_add_(0, token, y * routing.weights[token, choice, None].to(y.dtype))
    total[at : at + len(plus)] += plus
    return total.to(x.dtype)


def dequantized(slot: Tensor, shape: tuple[int, int], tile: tuple[int, int], like: Tensor) -> Tensor:
    """The matrix [n, k] of one slot in the wide dtype and on the device of `like`."""
    return Int4Tile(*tile).unpack(slot.cpu(), shape).dequantized().to(like.device, wide(like))
