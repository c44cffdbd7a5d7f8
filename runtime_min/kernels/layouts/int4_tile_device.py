"""Device loads of int4_tile.v1 (the map: int4_tile.py). Kernels call these; none computes a nibble offset itself.

slot_ptr is an int32 pointer to the slot of one [N, K] matrix. n0 is a multiple of BN and BN divides TILE_N, so a load
stays inside one tile; kt counts tiles of TILE_K inputs, g groups of 32 inside it. No masks: a tile is never partial.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def tile_index(n0, kt, K, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """Number of the tile that holds row n0, int64 because what it multiplies may pass 2**31."""
    return tl.cast(n0 // TILE_N, tl.int64) * (K // TILE_K) + kt


@triton.jit
def load_codes(slot_ptr, n0, kt, g, N, K, TILE_N: tl.constexpr, TILE_K: tl.constexpr, BN: tl.constexpr):
    """[BN, 32] int32 codes q in -8..7 of rows n0..n0 + BN, group g of k tile kt."""
    SLOTS: tl.constexpr = TILE_K // 32 if TILE_K < 128 else 4
    PLANES: tl.constexpr = TILE_K // 128 if TILE_K > 128 else 1
    ROW: tl.constexpr = TILE_K // 8
    rn = n0 % TILE_N + tl.arange(0, BN)
    r = tl.arange(0, 32)
    pair = r // 2
    word = pair % (4 * SLOTS) * PLANES + g // 4
    bit = 4 * (g % 4 + SLOTS * (pair // (4 * SLOTS))) + 16 * (r % 2)
    tile_ptr = slot_ptr + tile_index(n0, kt, K, TILE_N, TILE_K) * (TILE_N * ROW)
    words = tl.load(tile_ptr + rn[:, None] * ROW + word[None, :])
    return ((words >> bit[None, :]) & 15) - 8


@triton.jit
def load_scales(slot_ptr, n0, kt, g, N, K, TILE_N: tl.constexpr, TILE_K: tl.constexpr, BN: tl.constexpr):
    """[BN] fp32 scales of rows n0..n0 + BN, group g of k tile kt."""
    rn = n0 % TILE_N + tl.arange(0, BN)
    tile = tile_index(n0, kt, K, TILE_N, TILE_K)
    tile_ptr = slot_ptr + tl.cast(N, tl.int64) * (K // 8) + tile * (TILE_N * (TILE_K // 32) // 2)
    if TILE_K == 32:
        bits = tl.load(tile_ptr + rn // 2) >> (16 * (rn % 2))
    else:
        bits = tl.load(tile_ptr + g // 2 * TILE_N + rn) >> (16 * (g % 2))
    return (bits << 16).to(tl.float32, bitcast=True)
