"""Bidirectional attention over packed pictures, and the rotary positions before it.

rope: 4 bytes moved an element of q and k (bf16), nothing computed to speak of. attend: one program for BM queries of
one head; 4 n D operations a query of an item of n patches, 2 / BM bytes of keys and values an operation. The head is
cut in two parts of powers of two (72 = 64 + 8, the second padded to 16), so that little of a matrix product is wasted.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import dot, rounded


@triton.jit(do_not_specialize=["count"])
def rope(QKV, COS, SIN, count, H: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, ROWS: tl.constexpr):
    """Rotates the pairs of queries and keys in place. QKV [P, 3, H, 2 R]; COS, SIN fp32 [P, R]; count is 2 P H.

    Grid: blocks of ROWS heads of queries and keys, which lie side by side in a patch.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BR)
    seen = (row < count)[:, None] & (i < R)[None, :]
    patch, head = row // (2 * H), row % (2 * H)
    angle = patch[:, None] * R + i[None, :]
    cos, sin = tl.load(COS + angle, mask=seen, other=0.0), tl.load(SIN + angle, mask=seen, other=0.0)
    x = QKV + (patch * (3 * H) + head)[:, None] * (2 * R) + 2 * i[None, :]
    even, odd = tl.load(x, mask=seen, other=0.0).to(tl.float32), tl.load(x + 1, mask=seen, other=0.0).to(tl.float32)
    dtype: tl.constexpr = QKV.dtype.element_ty
    tl.store(x, rounded(even * cos - odd * sin, dtype), mask=seen)
    tl.store(x + 1, rounded(odd * cos + even * sin, dtype), mask=seen)


@triton.jit
def part(X, there, inside, EDGE: tl.constexpr, FULL: tl.constexpr):
    """The elements at X; zeros for keys that are not `there` (at the EDGE) and columns not `inside` (unless FULL)."""
    if EDGE:
        return tl.load(X, mask=there & inside, other=0.0)
    if FULL:
        return tl.load(X)
    return tl.load(X, mask=inside, other=0.0)


@triton.jit
def step(
    q, q_rest, K, V, start, length, scale, best, total, acc, acc_rest, EDGE: tl.constexpr, ROW: tl.constexpr,
    D: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Takes in the keys start..start + BN. Only at the EDGE may some of them be beyond the item."""
    key = start + tl.arange(0, BN)
    row = key.to(tl.int64) * ROW
    there = key < length
    a = tl.arange(0, BA)
    b = BA + tl.arange(0, BB if BB else 16)
    k = part(K + row[None, :] + a[:, None], there[None, :], (a < D)[:, None], EDGE, D >= BA)
    scores = dot(q, k, tl.zeros([q.shape[0], BN], tl.float32))
    if BB:
        k = part(K + row[None, :] + b[:, None], there[None, :], (b < D)[:, None], EDGE, D >= BA + BB)
        scores = dot(q_rest, k, scores)
    if EDGE:
        scores = tl.where(there[None, :], scores, -1e30)
    new = tl.maximum(best, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new[:, None])
    fade = tl.exp2(best - new)
    v = part(V + row[:, None] + a[None, :], there[:, None], (a < D)[None, :], EDGE, D >= BA)
    p = rounded(weights, v.dtype)
    acc = dot(p, v, acc * fade[:, None])
    if BB:
        v = part(V + row[:, None] + b[None, :], there[:, None], (b < D)[None, :], EDGE, D >= BA + BB)
        acc_rest = dot(p, v, acc_rest * fade[:, None])
    return new, total * fade + tl.sum(weights, 1), acc, acc_rest


@triton.jit(do_not_specialize=["scale"])
def attend(
    QKV, TILES, OUT, scale, H: tl.constexpr, D: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """QKV [P, 3, H, D] -> OUT [P, H, D]. Grid: tiles, heads.

    TILES int32 [tiles, 3]: first patch of the tile's item, patches of the item, first query of the tile within it.
    scale is in units of log 2. D is cut into BA and BB columns, BB 0 if BA holds all.
    """
    ROW: tl.constexpr = 3 * H * D
    tile, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(TILES + 3 * tile).to(tl.int64)
    length, at = tl.load(TILES + 3 * tile + 1), tl.load(TILES + 3 * tile + 2)
    i = at + tl.arange(0, BM)
    ok = i < length
    a = tl.arange(0, BA)
    b = BA + tl.arange(0, BB if BB else 16)
    Q = QKV + first * ROW + head * D
    K, V = Q + H * D, Q + 2 * H * D
    row = i.to(tl.int64) * ROW
    q = tl.load(Q + row[:, None] + a[None, :], mask=ok[:, None] & (a < D)[None, :], other=0.0)
    q_rest = tl.load(Q + row[:, None] + b[None, :], mask=ok[:, None] & (b < D)[None, :], other=0.0)
    best = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BA], tl.float32)
    acc_rest = tl.zeros([BM, BB if BB else 16], tl.float32)
    inner = length // BN * BN
    for start in tl.range(0, inner, BN, num_stages=STAGES):
        best, total, acc, acc_rest = step(
            q, q_rest, K, V, start, length, scale, best, total, acc, acc_rest, False, ROW, D, BA, BB, BN
        )
    if inner < length:
        best, total, acc, acc_rest = step(
            q, q_rest, K, V, inner, length, scale, best, total, acc, acc_rest, True, ROW, D, BA, BB, BN
        )
    out = OUT + ((first + i) * (H * D) + head * D)[:, None]
    dtype: tl.constexpr = OUT.dtype.element_ty
    tl.store(out + a[None, :], rounded(acc / total[:, None], dtype), mask=ok[:, None] & (a < D)[None, :])
    if BB:
        tl.store(out + b[None, :], rounded(acc_rest / total[:, None], dtype), mask=ok[:, None] & (b < D)[None, :])
