"""Dense products of few tokens: as fast as the weights can be read.

The weights are the M side of the product, so that few tokens waste nothing. Where rows alone do not fill the GPU,
blocks share a row tile along K: each leaves its partial sums in scratch, and whoever comes last adds them up in the
order of K, so the result does not depend on who that is. RMSNorm before the product costs one more sum: its factor
comes out of it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import INTERPRET, dot, ready


@triton.jit
def load_x(X, token, k, seen, K: tl.constexpr, SILU: tl.constexpr):
    """[BK, BM] inputs in fp32; SILU: of silu(gate) * up."""
    x = tl.load(X + token[None, :] + k[:, None], mask=seen, other=0.0).to(tl.float32)
    if SILU:
        up = tl.load(X + token[None, :] + K + k[:, None], mask=seen, other=0.0).to(tl.float32)
        x = x / (1 + tl.exp(-x)) * up
    return x


@triton.jit(do_not_specialize=["tokens", "eps"])
def product(
    X, GAMMA, W, Y, PARTS, SQUARES, DONE, tokens, eps,
    N: tl.constexpr, K: tl.constexpr, X_ROW: tl.constexpr, X_HEAD: tl.constexpr, Y_ROW: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    ACROSS: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Y[t, h, n] = sum over k of X[t, h, k] W[h, n, k] (ACROSS: W[h, k, n]).

    Grid: row tiles, SPLIT parts of K, heads times blocks of BM tokens. PARTS fp32 [tiles, SPLIT, BN, BM], SQUARES fp32
    [tiles, SPLIT, BM], DONE int32 [tiles], zero before and after; tiles counts axes 0 and 2 of the grid.
    """
    ready()
    tile_n, part = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(tokens, BM)
    head, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    t = block * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    token = t * X_ROW + head * X_HEAD
    w_head = W + head.to(tl.int64) * N * K
    STEPS: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    EVEN: tl.constexpr = K % (BK * SPLIT) == 0 and N % BN == 0
    acc = tl.zeros([BN, BM], tl.float32)
    squares = tl.zeros([BM], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = (part * STEPS + step) * BK + tl.arange(0, BK)
        place = k[None, :] * N + n[:, None] if ACROSS else n[:, None] * K + k[None, :]
        if EVEN:
            w = tl.load(w_head + place)
        else:
            w = tl.load(w_head + place, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        x = load_x(X, token, k, (t < tokens)[None, :] & (k < K)[:, None], K, SILU)
        if NORM:
            squares += tl.sum(x * x, 0)
            x *= tl.load(GAMMA + k, mask=k < K, other=0.0).to(tl.float32)[:, None]
        acc = dot(w, x.to(w.dtype), acc)
    if SPLIT > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tile_n
        cell = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(PARTS + (tile * SPLIT + part) * (BN * BM) + cell, acc)
        if NORM:
            tl.store(SQUARES + (tile * SPLIT + part) * BM + tl.arange(0, BM), squares)
        tl.debug_barrier()
        if tl.atomic_add(DONE + tile, 1, sem="acq_rel") < SPLIT - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros([BN, BM], tl.float32)
        squares = tl.zeros([BM], tl.float32)
        for s in tl.static_range(SPLIT):
            acc += tl.load(PARTS + (tile * SPLIT + s) * (BN * BM) + cell, cache_modifier="" if INTERPRET else ".cg")
            if NORM:
                squares += tl.load(SQUARES + (tile * SPLIT + s) * BM + tl.arange(0, BM))
        tl.store(DONE + tile, 0)
    if NORM:
        acc *= tl.rsqrt(squares / K + eps)[None, :]
    out = Y + t[None, :].to(tl.int64) * Y_ROW + head * N + n[:, None]
    tl.store(out, acc.to(Y.dtype.element_ty), mask=(t < tokens)[None, :] & (n < N)[:, None])
