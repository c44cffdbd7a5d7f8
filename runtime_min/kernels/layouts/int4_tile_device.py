"""Device loads of int4_tile.v1 (the map: int4_tile.py). Kernels call these; none computes a nibble offset itself.

slot_ptr is an int32 pointer to the slot of one [N, K] matrix. n0 is a multiple of BN and BN divides TILE_N, so a load
stays inside one tile; kt counts tiles of TILE_K inputs, g groups of 32 inside it. No masks: a tile is never partial.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import INTERPRET


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


@triton.jit
def eight_codes(words):
    """[BN, 32] words of the rows of a tile with TILE_K 256 -> the codes of its groups 0..7, each [BN, 32] bf16.

    Words 2p and 2p + 1 of a row hold inputs 2p and 2p + 1 of groups 0..3 and 4..7. A masked nibble pair with the
    exponent of 128 on top is the bf16 pair 128 + q + 8; taking 136 away (by fma, which sm80 has too) leaves q exactly.
    """
    return tl.inline_asm_elementwise(
        asm="""{
        .reg .b32 t, mask, high, one, bias;
        mov.b32 mask, 0x000F000F; mov.b32 high, 0x43004300; mov.b32 one, 0x3F803F80; mov.b32 bias, 0xC308C308;
        lop3.b32 $0, $8, mask, high, 0xEA;
        shr.u32 t, $8, 4;  lop3.b32 $1, t, mask, high, 0xEA;
        shr.u32 t, $8, 8;  lop3.b32 $2, t, mask, high, 0xEA;
        shr.u32 t, $8, 12; lop3.b32 $3, t, mask, high, 0xEA;
        lop3.b32 $4, $9, mask, high, 0xEA;
        shr.u32 t, $9, 4;  lop3.b32 $5, t, mask, high, 0xEA;
        shr.u32 t, $9, 8;  lop3.b32 $6, t, mask, high, 0xEA;
        shr.u32 t, $9, 12; lop3.b32 $7, t, mask, high, 0xEA;
        fma.rn.bf16x2 $0, $0, one, bias; fma.rn.bf16x2 $1, $1, one, bias;
        fma.rn.bf16x2 $2, $2, one, bias; fma.rn.bf16x2 $3, $3, one, bias;
        fma.rn.bf16x2 $4, $4, one, bias; fma.rn.bf16x2 $5, $5, one, bias;
        fma.rn.bf16x2 $6, $6, one, bias; fma.rn.bf16x2 $7, $7, one, bias;
        }""",
        constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        args=[words],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@triton.jit
def load_words(slot_ptr, n0, kt, K, TILE_N: tl.constexpr, BN: tl.constexpr):
    """[BN, 32] int32 words of rows n0..n0 + BN of k tile kt, TILE_K 256: one contiguous run."""
    rn = n0 % TILE_N + tl.arange(0, BN)
    tile_ptr = slot_ptr + tile_index(n0, kt, K, TILE_N, 256) * (TILE_N * 32)
    return tl.load(tile_ptr + rn[:, None] * 32 + tl.arange(0, 32)[None, :])


@triton.jit
def load_eight(slot_ptr, n0, kt, N, K, TILE_N: tl.constexpr, BN: tl.constexpr):
    """Codes of groups 0..7 of rows n0..n0 + BN of k tile kt, TILE_K 256: eight [BN, 32] of bf16 (fp32 in
    the interpreter)."""
    if INTERPRET:
        return (
            load_codes(slot_ptr, n0, kt, 0, N, K, TILE_N, 256, BN).to(tl.float32),
            load_codes(slot_ptr, n0, kt, 1, N, K, TILE_N, 256, BN).to(tl.float32),
            load_codes(slot_ptr, n0, kt, 2, N, K, TILE_N, 256, BN).to(tl.float32),
            load_codes(slot_ptr, n0, kt, 3, N, K, TILE_N, 256, BN).to(tl.float32),
            load_codes(slot_ptr, n0, kt, 4, N, K, TILE_N, 256, BN).to(tl.float32),
            load_codes(slot_ptr, n0, kt, 5, N, K, TILE_N, 256, BN).to(tl.float32),
            load_codes(slot_ptr, n0, kt, 6, N, K, TILE_N, 256, BN).to(tl.float32),
            load_codes(slot_ptr, n0, kt, 7, N, K, TILE_N, 256, BN).to(tl.float32),
        )
    return eight_codes(load_words(slot_ptr, n0, kt, K, TILE_N, BN))


@triton.jit
def load_scale_pairs(slot_ptr, n0, kt, pair, N, K, TILE_N: tl.constexpr, BN: tl.constexpr):
    """[BN] fp32 scales of groups 2 pair and 2 pair + 1 of k tile kt, TILE_K 256."""
    rn = n0 % TILE_N + tl.arange(0, BN)
    tile_ptr = slot_ptr + tl.cast(N, tl.int64) * (K // 8) + tile_index(n0, kt, K, TILE_N, 256) * (TILE_N * 4)
    bits = tl.load(tile_ptr + pair * TILE_N + rn)
    return (bits << 16).to(tl.float32, bitcast=True), (bits & -65536).to(tl.float32, bitcast=True)
