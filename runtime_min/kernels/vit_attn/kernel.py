"""Rotary positions of packed pictures, and attention within each of them.

Weights of a softmax are right whatever a row's scores are measured from, as long as nothing overflows and the largest
is not lost: with FP32's exponents, from 60 below to 100 above in powers of two. So scores are measured from the row's
largest over the first block of keys, and the matrix unit takes it off: it is one more column of the queries, against
ones in the keys. Ones in the values add the weights up. What is left to do for a score is to raise 2 to it. The sums
tell whether the measure was good: a later score may be far above it, and bf16 is coarse where it is large. Tiles for
which it was not are done again, with the largest score kept on the way.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import dot, ready, rounded


@triton.jit(do_not_specialize=["count"])
def rope(QKV, COS, SIN, count, H: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, ROWS: tl.constexpr):
    """Rotates the pairs of queries and keys in place. QKV [P, 3, H, 2 R]; COS, SIN fp32 [P, R]; count is 2 P H.

    Grid: blocks of ROWS heads of queries and keys, which lie side by side in a patch. 4 bytes moved an element of q
    and k (bf16), nothing computed to speak of.
    """
    ready()
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
def turned(QKV, COS, SIN, row, patch, which, there, scale, FIRST: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """Columns FIRST..FIRST + W of rows of QKV, fp32 [rows, W]: rotated, queries times scale; zero from D on."""
    c, i = FIRST + tl.arange(0, W), FIRST // 2 + tl.arange(0, W // 2)
    x = tl.load(QKV + row[:, None] * D + c[None, :], mask=there[:, None] & (c < D)[None, :], other=0.0)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [x.shape[0], W // 2, 2]))
    angle = patch[:, None] * (D // 2) + i[None, :]
    turns = (there & (which < 2))[:, None] & (2 * i < D)[None, :]
    cos, sin = tl.load(COS + angle, mask=turns, other=1.0), tl.load(SIN + angle, mask=turns, other=0.0)
    times = tl.where(which == 0, scale, 1.0)[:, None]
    pairs = tl.join((even * cos - odd * sin) * times, (odd * cos + even * sin) * times)
    return tl.reshape(pairs, [x.shape[0], W])


@triton.jit(do_not_specialize=["patches", "scale"])
def pack(
    QKV, COS, SIN, LOW, REST, patches, scale, H: tl.constexpr, D: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """QKV [P, 3, H, D] rotated, queries times scale, as LOW [3, H, P, L] of the first L columns and REST [3, H, P, R]
    of the others, then ones for keys and values, zeros for queries, and zeros.

    Grid: blocks of ROWS rows of QKV.
    """
    ready()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < patches.to(tl.int64) * (3 * H)
    patch, head = row // (3 * H), row % (3 * H)
    which = head // H
    out = head * patches + patch
    dtype: tl.constexpr = QKV.dtype.element_ty
    x = turned(QKV, COS, SIN, row, patch, which, there, scale, 0, D, L)
    c = tl.arange(0, L)
    tl.store(LOW + out[:, None] * L + c[None, :], rounded(x, dtype), mask=there[:, None])
    x = turned(QKV, COS, SIN, row, patch, which, there, scale, L, D, R)
    c = tl.arange(0, R)
    one: tl.constexpr = max(D - L, 0)
    x = tl.where((c == one)[None, :] & (which > 0)[:, None], 1.0, x)
    tl.store(REST + out[:, None] * R + c[None, :], rounded(x, dtype), mask=there[:, None])


@triton.jit
def table(X, rows, N: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """What `block` reads of X [rows, W]: a descriptor of N rows at a time, or the pointer."""
    if TMA:
        return tl.make_tensor_descriptor(X, [rows, W], [W, 1], [N, W])
    else:
        return X


@triton.jit
def block(X, first, end, N: tl.constexpr, W: tl.constexpr, EDGE: tl.constexpr, ACROSS: tl.constexpr, TMA: tl.constexpr):
    """Rows first..first + N of X [., W], ACROSS: as columns. At the EDGE, and by TMA, zero from `end` on.

    TMA: X is a descriptor. Only the loop over full blocks reads by those.
    """
    i, c = first + tl.arange(0, N), tl.arange(0, W)
    if TMA:
        x = X.load([first, 0])
        if ACROSS:
            x = x.T
    elif ACROSS:
        x = X + i[None, :] * W + c[:, None]
        x = tl.load(x, mask=(i < end)[None, :], other=0.0) if EDGE else tl.load(x)
    else:
        x = X + i[:, None] * W + c[None, :]
        x = tl.load(x, mask=(i < end)[:, None], other=0.0) if EDGE else tl.load(x)
    return x


@triton.jit
def scored(q, K, first, end, scores, EDGE: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr):
    """Scores of the keys first..first + N, as far as these columns of them go."""
    return dot(q, block(K, first, end, N, q.shape[1], EDGE, True, TMA), scores)


@triton.jit
def added(weights, V_LOW, V_REST, first, end, low, rest, EDGE: tl.constexpr, N: tl.constexpr, TMA: tl.constexpr):
    """The sums with the values first..first + N."""
    low = dot(weights, block(V_LOW, first, end, N, low.shape[1], EDGE, False, TMA), low)
    return low, dot(weights, block(V_REST, first, end, N, rest.shape[1], EDGE, False, TMA), rest)


@triton.jit
def quick(
    q_low, q_rest, begun, K_LOW, K_REST, V_LOW, V_REST, length, low, rest, N: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Sums over the full blocks of N keys, with weights measured from where the queries say; scores begun beyond them.
    begun: scores of the first N keys by q_low.

    AHEAD: a block's scores are begun in the turn before, and nothing waits for them there. What is begun beyond the
    last key is not used; it is memory of ours, as values follow keys.
    """
    dtype: tl.constexpr = q_low.dtype
    full = length // N * N
    nothing = tl.zeros([q_low.shape[0], N], tl.float32)
    for first in tl.range(0, full, N, num_stages=STAGES):
        if AHEAD:
            scores = scored(q_rest, K_REST, first, length, begun, False, N, TMA)
        else:
            scores = scored(q_low, K_LOW, first, length, nothing, False, N, TMA)
            scores = scored(q_rest, K_REST, first, length, scores, False, N, TMA)
        weights = rounded(tl.exp2(scores), dtype)
        low, rest = added(weights, V_LOW, V_REST, first, length, low, rest, False, N, TMA)
        if AHEAD:
            begun = scored(q_low, K_LOW, first + N, length, nothing, False, N, TMA)
    return low, rest, begun


@triton.jit
def tail(
    q_low, q_rest, begun, K_LOW, K_REST, V_LOW, V_REST, length, low, rest, N: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """The sums with the keys beyond the full blocks of N, if there are any."""
    full = length // N * N
    if full < length:
        nothing = tl.zeros([q_low.shape[0], N], tl.float32)
        scores = begun if AHEAD else scored(q_low, K_LOW, full, length, nothing, True, N, False)
        scores = scored(q_rest, K_REST, full, length, scores, True, N, False)
        weights = tl.where((full + tl.arange(0, N) < length)[None, :], tl.exp2(scores), 0.0)
        low, rest = added(rounded(weights, q_low.dtype), V_LOW, V_REST, full, length, low, rest, True, N, False)
    return low, rest


@triton.jit
def careful(q_low, q_rest, K_LOW, K_REST, V_LOW, V_REST, length, low, rest, N: tl.constexpr):
    """The same sums from nothing, measured from the largest score so far."""
    best = tl.full([q_low.shape[0]], -1e30, tl.float32)
    low, rest = tl.zeros_like(low), tl.zeros_like(rest)
    for first in tl.range(0, length, N, num_stages=1):
        scores = scored(q_low, K_LOW, first, length, tl.zeros([q_low.shape[0], N], tl.float32), True, N, False)
        scores = scored(q_rest, K_REST, first, length, scores, True, N, False)
        seen = (first + tl.arange(0, N) < length)[None, :]
        scores = tl.where(seen, scores, -1e30)
        new = tl.maximum(best, tl.max(scores, 1))
        weights = rounded(tl.where(seen, tl.exp2(scores - new[:, None]), 0.0), q_low.dtype)
        fade = tl.exp2(best - new)[:, None]
        low, rest = added(weights, V_LOW, V_REST, first, length, low * fade, rest * fade, True, N, False)
        best = new
    return low, rest


@triton.jit
def item(tile):
    """Where a tile's item begins, its length, the tile's first query. Read anew at every call: what follows from them
    is then not kept in registers over the loop, which needs them all."""
    return tl.load(tile, volatile=True), tl.load(tile + 1, volatile=True), tl.load(tile + 2, volatile=True)


@triton.jit(do_not_specialize=["patches"])
def attend(
    LOW, REST, TILES, OUT, patches, H: tl.constexpr, D: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of BM queries, heads. LOW and REST as `pack` leaves them, scores in units of log 2.

    TILES int32 [., 3]: where a tile's item begins, its length, and the tile's first query in it. OUT [P, H, D].
    """
    ready()
    tile, head = TILES + 3 * tl.program_id(0), tl.program_id(1).to(tl.int64)
    start, length, first = item(tile)
    one: tl.constexpr = max(D - L, 0)
    dtype: tl.constexpr = LOW.dtype.element_ty
    q, k, v = head * patches + start, (H + head) * patches + start, (2 * H + head) * patches + start
    q_low = block(LOW + q * L, first, length, BM, L, True, False, False)
    q_rest = block(REST + q * R, first, length, BM, R, True, False, False)
    K_LOW, V_LOW, K_REST, V_REST = LOW + k * L, LOW + v * L, REST + k * R, REST + v * R
    begun = scored(q_low, K_LOW, 0, length, tl.zeros([BM, BN], tl.float32), True, BN, False)
    scores = scored(q_rest, K_REST, 0, length, begun, True, BN, False)
    best = tl.max(tl.where((tl.arange(0, BN) < length)[None, :], scores, -1e30), 1)
    measure = (tl.arange(0, R) == one)[None, :]
    low, rest = tl.zeros([BM, L], tl.float32), tl.zeros([BM, R], tl.float32)
    q_near = tl.where(measure, rounded(-best, dtype)[:, None], q_rest)
    low, rest, begun = quick(
        q_low, q_near, begun, table(K_LOW, length, BN, L, TMA), table(K_REST, length, BN, R, TMA),
        table(V_LOW, length, BN, L, TMA), table(V_REST, length, BN, R, TMA), length, low, rest, BN, AHEAD, STAGES, TMA,
    )  # fmt: skip
    start, length, first = item(tile)
    k, v = (H + head) * patches + start, (2 * H + head) * patches + start
    K_LOW, V_LOW, K_REST, V_REST = LOW + k * L, LOW + v * L, REST + k * R, REST + v * R
    low, rest = tail(q_low, q_near, begun, K_LOW, K_REST, V_LOW, V_REST, length, low, rest, BN, AHEAD)
    total = tl.sum(tl.where(measure, rest, 0.0), 1)
    # Not a number is not good either. A column, as Triton 3.6 fails for Blackwell on a row made into one number.
    good = (total > 2.0**-60) & (total < 2.0**100)
    if tl.min(good.to(tl.int32)[:, None], 0).item() == 0:
        low, rest = careful(q_low, q_rest, K_LOW, K_REST, V_LOW, V_REST, length, low, rest, BN)
        total = tl.sum(tl.where(measure, rest, 0.0), 1)
    start, length, first = item(tile)
    i, c, r = first + tl.arange(0, BM), tl.arange(0, L), L + tl.arange(0, R)
    out = OUT + ((start + i).to(tl.int64) * H + head)[:, None] * D
    there = (i < length)[:, None]
    tl.store(out + c[None, :], rounded(low / total[:, None], dtype), mask=there & (c < D)[None, :])
    tl.store(out + r[None, :], rounded(rest / total[:, None], dtype), mask=there & (r < D)[None, :])
