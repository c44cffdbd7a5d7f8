"""Routed experts with INT4 weights: a table of who goes where, two grouped products, and what lies between and after.

A route is one (token, choice) pair, numbered token * TOP_K + choice. A block is up to BM routes of one expert. With few
tokens every route is a block of its own and no table is needed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import dot, ready, rounded
from runtime_min.kernels.layouts.int4_tile_device import load_codes, load_eight, load_scale_pairs, load_scales


@triton.jit(do_not_specialize=["first", "routes"])
def count(IDS, COUNTS, first, routes, BLOCK: tl.constexpr):
    """COUNTS[e]: routes to expert first + e. Grid: experts here."""
    ready()
    e = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, routes, BLOCK):
        r = start + tl.arange(0, BLOCK)
        total += (tl.load(IDS + r, mask=r < routes, other=-1) == first + e).to(tl.int32)
    tl.store(COUNTS + e, tl.sum(total, 0))


@triton.jit(do_not_specialize=["first", "routes"])
def table(
    IDS, COUNTS, SORTED, EXPERTS, BLOCKS, first, routes,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SORTED: routes by expert, in order, each expert's padded with `routes` to whole blocks of BM; EXPERTS: whose a
    block is; BLOCKS[0]: their number. Grid: experts here."""
    ready()
    e = tl.program_id(0)
    every = tl.arange(0, BE)
    needed = (tl.load(COUNTS + every, mask=every < E, other=0) + BM - 1) // BM
    before = tl.sum(tl.where(every < e, needed, 0), 0)
    mine = tl.sum(tl.where(every == e, needed, 0), 0)
    if e == E - 1:
        tl.store(BLOCKS, before + mine)
    for block in tl.range(0, mine):
        tl.store(EXPERTS + before + block, e)
    place = before * BM
    for start in tl.range(0, routes, BLOCK):
        r = start + tl.arange(0, BLOCK)
        hit = (tl.load(IDS + r, mask=r < routes, other=-1) == first + e).to(tl.int32)
        tl.store(SORTED + place + tl.cumsum(hit, 0) - 1, r, mask=hit > 0)
        place += tl.sum(hit, 0)
    lane = tl.arange(0, BM)
    tl.store(SORTED + place + lane, tl.zeros([BM], tl.int32) + routes, mask=place + lane < (before + mine) * BM)


@triton.jit
def scaled(w, scale, x):
    """Codes [BN, 32] times scale [BN] fp32, which holds bf16 values, rounded once to the dtype of x."""
    if w.dtype == tl.bfloat16 and x.dtype == tl.bfloat16:
        factor = tl.broadcast_to(scale.to(tl.bfloat16)[:, None], w.shape)
        # Two products at once; adding -0 changes nothing, and sm80 has no plain product of bf16 pairs.
        return tl.inline_asm_elementwise(
            asm="{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }",
            constraints="=r,r,r",
            args=[w, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return rounded(w.to(tl.float32) * scale[:, None], x.dtype)


@triton.jit
def held(acc, w, scale, x, WIDE: tl.constexpr):
    """acc [BN, BM] plus one scale group: w [BN, 32] codes, scale [BN] fp32, x [32, BM]."""
    if WIDE:
        return dot(scaled(w, scale, x), x, acc)
    return acc + dot(rounded(w.to(tl.float32), x.dtype), x, tl.zeros(acc.shape, tl.float32)) * scale[:, None]


@triton.jit
def group(acc, w, scale, X, row, k, seen, WIDE: tl.constexpr):
    """`held` with the inputs of rows `row` of X."""
    x = tl.load(X + row[None, :] + k + tl.arange(0, 32)[:, None], mask=seen[None, :], other=0.0)
    return held(acc, w, scale, x, WIDE)


@triton.jit
def block_of(
    IDS, SORTED, EXPERTS, BLOCKS, first, routes, block, HERE: tl.constexpr, BM: tl.constexpr, DIRECT: tl.constexpr
):
    """Expert and routes [BM] of a block, `routes` where it has none; expert -1 for a block that is nobody's here."""
    lane = tl.arange(0, BM)
    if DIRECT:
        e = tl.load(IDS + block) - first
        e = tl.where((e >= 0) & (e < HERE), e, -1)
        route = tl.where(lane == 0, block, routes)
    else:
        # Past the last block lies room that nobody filled.
        e = tl.where(block < tl.load(BLOCKS), tl.load(EXPERTS + block), -1)
        route = tl.load(SORTED + block * BM + lane)
    return e, route


@triton.jit(do_not_specialize=["first", "routes", "x_row"])
def product(
    X, SLOTS, Y, IDS, SORTED, EXPERTS, BLOCKS, first, routes, x_row,
    HERE: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr, PER_ROW: tl.constexpr,
    DIRECT: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y[split, route, n] = sum over its part of k of X[route // PER_ROW, k] W[expert of route, n, k].

    Grid: row tiles of BN, SPLIT parts of K, blocks. WORDS: int32 words of an expert's slot. DIRECT: blocks are routes.
    """
    ready()
    tile_n, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    e, route = block_of(IDS, SORTED, EXPERTS, BLOCKS, first, routes, block, HERE, BM, DIRECT)
    if e < 0:
        return
    seen = route < routes
    x_row = x_row // 8 * 8
    row = (route // PER_ROW).to(tl.int64) * x_row
    slot = SLOTS + e.to(tl.int64) * WORDS
    n0 = tile_n * BN
    STEPS: tl.constexpr = K // TILE_K // SPLIT
    acc = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        kt = part * STEPS + step
        k = kt * TILE_K
        if TILE_K == 256:
            w0, w1, w2, w3, w4, w5, w6, w7 = load_eight(slot, n0, kt, N, K, TILE_N, BN)
            s0, s1 = load_scale_pairs(slot, n0, kt, 0, N, K, TILE_N, BN)
            s2, s3 = load_scale_pairs(slot, n0, kt, 1, N, K, TILE_N, BN)
            s4, s5 = load_scale_pairs(slot, n0, kt, 2, N, K, TILE_N, BN)
            s6, s7 = load_scale_pairs(slot, n0, kt, 3, N, K, TILE_N, BN)
            acc = group(acc, w0, s0, X, row, k, seen, WIDE)
            acc = group(acc, w1, s1, X, row, k + 32, seen, WIDE)
            acc = group(acc, w2, s2, X, row, k + 64, seen, WIDE)
            acc = group(acc, w3, s3, X, row, k + 96, seen, WIDE)
            acc = group(acc, w4, s4, X, row, k + 128, seen, WIDE)
            acc = group(acc, w5, s5, X, row, k + 160, seen, WIDE)
            acc = group(acc, w6, s6, X, row, k + 192, seen, WIDE)
            acc = group(acc, w7, s7, X, row, k + 224, seen, WIDE)
        else:
            for g in tl.static_range(TILE_K // 32):
                w = load_codes(slot, n0, kt, g, N, K, TILE_N, TILE_K, BN)
                scale = load_scales(slot, n0, kt, g, N, K, TILE_N, TILE_K, BN)
                acc = group(acc, w, scale, X, row, k + 32 * g, seen, WIDE)
    out = Y + (part.to(tl.int64) * routes + route[None, :]) * N + n0 + tl.arange(0, BN)[:, None]
    tl.store(out, rounded(acc, Y.dtype.element_ty), mask=seen[None, :])


@triton.jit
def activated(GATE_UP, at, seen, k, routes, DTYPE: tl.constexpr, W: tl.constexpr, PARTS: tl.constexpr):
    """[32, BM] of silu(gate) * up at inputs k.., summed over the parts of GATE_UP [PARTS, routes, 2 W]."""
    place = GATE_UP + at[None, :] + k + tl.arange(0, 32)[:, None]
    gate = tl.zeros([32, at.shape[0]], tl.float32)
    up = tl.zeros([32, at.shape[0]], tl.float32)
    for _ in tl.static_range(PARTS):
        gate += tl.load(place, mask=seen[None, :], other=0.0).to(tl.float32)
        up += tl.load(place + W, mask=seen[None, :], other=0.0).to(tl.float32)
        place += routes.to(tl.int64) * (2 * W)
    return rounded(gate / (1 + tl.exp(-gate)) * up, DTYPE)


@triton.jit(do_not_specialize=["first", "routes"])
def narrow(
    GATE_UP, SLOTS, Y, IDS, SORTED, EXPERTS, BLOCKS, first, routes, BF16: tl.constexpr,
    HERE: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr, TILE_N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    ITER: tl.constexpr, PARTS: tl.constexpr, DIRECT: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y[route, n] = sum over k of silu(gate) * up of GATE_UP [PARTS, routes, 512] times W[expert of route, n, k].

    K is 256, one tile, so a program walks over ITER tiles of rows with its inputs in registers. Grid: walks, 1, blocks.
    """
    ready()
    e, route = block_of(IDS, SORTED, EXPERTS, BLOCKS, first, routes, tl.program_id(2), HERE, BM, DIRECT)
    if e < 0:
        return
    seen = route < routes
    at = route.to(tl.int64) * 512
    slot = SLOTS + e.to(tl.int64) * WORDS
    first_n = tl.program_id(0) * (ITER * BN)
    DTYPE: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    x0 = activated(GATE_UP, at, seen, 0, routes, DTYPE, 256, PARTS)
    x1 = activated(GATE_UP, at, seen, 32, routes, DTYPE, 256, PARTS)
    x2 = activated(GATE_UP, at, seen, 64, routes, DTYPE, 256, PARTS)
    x3 = activated(GATE_UP, at, seen, 96, routes, DTYPE, 256, PARTS)
    x4 = activated(GATE_UP, at, seen, 128, routes, DTYPE, 256, PARTS)
    x5 = activated(GATE_UP, at, seen, 160, routes, DTYPE, 256, PARTS)
    x6 = activated(GATE_UP, at, seen, 192, routes, DTYPE, 256, PARTS)
    x7 = activated(GATE_UP, at, seen, 224, routes, DTYPE, 256, PARTS)
    for step in tl.range(0, ITER, num_stages=STAGES):
        n0 = first_n + step * BN
        w0, w1, w2, w3, w4, w5, w6, w7 = load_eight(slot, n0, 0, N, 256, TILE_N, BN)
        s0, s1 = load_scale_pairs(slot, n0, 0, 0, N, 256, TILE_N, BN)
        s2, s3 = load_scale_pairs(slot, n0, 0, 1, N, 256, TILE_N, BN)
        s4, s5 = load_scale_pairs(slot, n0, 0, 2, N, 256, TILE_N, BN)
        s6, s7 = load_scale_pairs(slot, n0, 0, 3, N, 256, TILE_N, BN)
        acc = held(tl.zeros([BN, BM], tl.float32), w0, s0, x0, WIDE)
        acc = held(acc, w1, s1, x1, WIDE)
        acc = held(acc, w2, s2, x2, WIDE)
        acc = held(acc, w3, s3, x3, WIDE)
        acc = held(acc, w4, s4, x4, WIDE)
        acc = held(acc, w5, s5, x5, WIDE)
        acc = held(acc, w6, s6, x6, WIDE)
        acc = held(acc, w7, s7, x7, WIDE)
        out = Y + route[None, :].to(tl.int64) * N + n0 + tl.arange(0, BN)[:, None]
        tl.store(out, rounded(acc, Y.dtype.element_ty), mask=seen[None, :])


@triton.jit(do_not_specialize=["first", "routes"])
def activate(
    GATE_UP, IDS, H, first, routes, HERE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr
):
    """H[route] = silu(gate) * up of the summed parts of GATE_UP [SPLIT, routes, 2 W]. Grid: routes, blocks of W."""
    ready()
    route = tl.program_id(0).to(tl.int64)
    e = tl.load(IDS + route) - first
    if (e < 0) | (e >= HERE):
        return
    w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    at = GATE_UP + route * (2 * W) + w
    for _ in tl.static_range(SPLIT):
        gate += tl.load(at, mask=w < W, other=0.0).to(tl.float32)
        up += tl.load(at + W, mask=w < W, other=0.0).to(tl.float32)
        at += routes.to(tl.int64) * (2 * W)
    tl.store(H + route * W + w, rounded(gate / (1 + tl.exp(-gate)) * up, H.dtype.element_ty), mask=w < W)


@triton.jit(do_not_specialize=["first", "at", "rows"])
def add_up(
    Y, IDS, WEIGHTS, PLUS, OUT, first, at, rows,
    HERE: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT[t] = sum over the choices of t that are here, best first, of weight times Y[route]; then PLUS[t - at], which
    has `rows` rows. Grid: tokens, blocks."""
    ready()
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        route = t * TOP_K + choice
        e = tl.load(IDS + route) - first
        if (e >= 0) & (e < HERE):
            acc += tl.load(WEIGHTS + route) * tl.load(Y + route * N + n, mask=n < N, other=0.0).to(tl.float32)
    if (t >= at) & (t < at + rows):
        acc += tl.load(PLUS + (t - at) * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(OUT + t * N + n, rounded(acc, OUT.dtype.element_ty), mask=n < N)
