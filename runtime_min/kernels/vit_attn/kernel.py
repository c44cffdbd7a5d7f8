"""Rotary positions of packed pictures, and attention within each of them.

Weights of a softmax are right whatever a row's scores are measured from, as long as nothing overflows and the largest
is not lost: with FP32's exponents, from 60 below to 100 above in powers of two. So scores are measured from the row's
largest over the first block of keys, and the matrix unit takes it off: it is one more column of the queries, against
ones in the keys. Ones in the values add the weights up. What is left to do for a score is to raise 2 to it. Items are
padded to whole blocks with keys and values of zeros alone, which have no one to add: nothing is masked. The sums
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


@triton.jit(do_not_specialize=["padded", "scale"])
def pack(
    QKV, COS, SIN, PLACES, LOW, REST, padded, scale, H: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """QKV [., 3, H, D] rotated, queries times scale, as LOW [3, H, padded, L] of the first L columns and REST
    [3, H, padded, R] of the others, then ones for keys and values, zeros for queries, and zeros.

    PLACES int32 [padded]: the patch of QKV that goes there; zeros go where it is negative. Grid: blocks of ROWS rows.
    """
    ready()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < padded.to(tl.int64) * (3 * H)
    at, head = row // (3 * H), row % (3 * H)
    patch = tl.load(PLACES + at, mask=inside, other=-1).to(tl.int64)
    there = patch >= 0
    which = head // H
    row = patch * (3 * H) + head
    out = head * padded + at
    dtype: tl.constexpr = QKV.dtype.element_ty
    x = turned(QKV, COS, SIN, row, patch, which, there, scale, 0, D, L)
    c = tl.arange(0, L)
    tl.store(LOW + out[:, None] * L + c[None, :], rounded(x, dtype), mask=inside[:, None])
    x = turned(QKV, COS, SIN, row, patch, which, there, scale, L, D, R)
    c = tl.arange(0, R)
    one: tl.constexpr = max(D - L, 0)
    x = tl.where((c == one)[None, :] & (there & (which > 0))[:, None], 1.0, x)
    tl.store(REST + out[:, None] * R + c[None, :], rounded(x, dtype), mask=inside[:, None])


@triton.jit
def table(X, rows, N: tl.constexpr, W: tl.constexpr, TMA: tl.constexpr):
    """What `block` reads of X [rows, W]: a descriptor of N rows at a time, or the pointer."""
    if TMA:
        return tl.make_tensor_descriptor(X, [rows, W], [W, 1], [N, W])
    else:
        return X


@triton.jit
def block(X, first, N: tl.constexpr, W: tl.constexpr, ACROSS: tl.constexpr, TMA: tl.constexpr):
    """Rows first..first + N of X [., W], ACROSS: as columns. TMA: X is a descriptor."""
    i, c = first + tl.arange(0, N), tl.arange(0, W)
    if TMA:
        x = X.load([first, 0])
        if ACROSS:
            x = x.T
    elif ACROSS:
        x = tl.load(X + i[None, :] * W + c[:, None])
    else:
        x = tl.load(X + i[:, None] * W + c[None, :])
    return x


@triton.jit
def scored(q, K, first, scores, N: tl.constexpr, TMA: tl.constexpr):
    """Scores of the keys first..first + N, as far as these columns of them go."""
    return dot(q, block(K, first, N, q.shape[1], True, TMA), scores)


@triton.jit
def added(weights, V_LOW, V_REST, first, low, rest, N: tl.constexpr, TMA: tl.constexpr):
    """The sums with the values first..first + N."""
    low = dot(weights, block(V_LOW, first, N, low.shape[1], False, TMA), low)
    return low, dot(weights, block(V_REST, first, N, rest.shape[1], False, TMA), rest)


@triton.jit
def quick(
    q_low, q_rest, begun, K_LOW, K_REST, V_LOW, V_REST, keys, low, rest, N: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Sums over all keys, padding included, with weights measured from where the queries say.
    begun: scores of the first N keys by q_low.

    AHEAD: a block's scores are begun in the turn before, and nothing waits for them there. What is begun beyond the
    last key is not used; it is memory of ours, as values follow keys.
    """
    nothing = tl.zeros([q_low.shape[0], N], tl.float32)
    for first in tl.range(0, keys, N, num_stages=STAGES):
        if AHEAD:
            scores = scored(q_rest, K_REST, first, begun, N, TMA)
        else:
            scores = scored(q_low, K_LOW, first, nothing, N, TMA)
            scores = scored(q_rest, K_REST, first, scores, N, TMA)
        weights = rounded(tl.exp2(scores), q_low.dtype)
        low, rest = added(weights, V_LOW, V_REST, first, low, rest, N, TMA)
        if AHEAD:
            begun = scored(q_low, K_LOW, first + N, nothing, N, TMA)
    return low, rest


@triton.jit
def careful(q_low, q_rest, K_LOW, K_REST, V_LOW, V_REST, length, low, rest, N: tl.constexpr):
    """The same sums from nothing, measured from the largest score so far."""
    best = tl.full([q_low.shape[0]], -1e30, tl.float32)
    low, rest = tl.zeros_like(low), tl.zeros_like(rest)
    for first in tl.range(0, length, N, num_stages=1):
        scores = scored(q_low, K_LOW, first, tl.zeros([q_low.shape[0], N], tl.float32), N, False)
        scores = scored(q_rest, K_REST, first, scores, N, False)
        seen = (first + tl.arange(0, N) < length)[None, :]
        scores = tl.where(seen, scores, -1e30)
        new = tl.maximum(best, tl.max(scores, 1))
        weights = rounded(tl.where(seen, tl.exp2(scores - new[:, None]), 0.0), q_low.dtype)
        fade = tl.exp2(best - new)[:, None]
        low, rest = added(weights, V_LOW, V_REST, first, low * fade, rest * fade, N, False)
        best = new
    return low, rest


@triton.jit
def item(tile):
    """Of a tile: where its item begins in LOW and REST, and in OUT, the item's length, the tile's first query in it.
    Read anew at every call: what follows from them is then not kept in registers over the loop, which needs them all.
    """
    at, start = tl.load(tile, volatile=True), tl.load(tile + 1, volatile=True)
    return at, start, tl.load(tile + 2, volatile=True), tl.load(tile + 3, volatile=True)


@triton.jit(do_not_specialize=["padded"])
def attend(
    LOW, REST, TILES, OUT, padded, H: tl.constexpr, D: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of BM queries, heads. LOW and REST as `pack` leaves them, scores in units of log 2; every item there
    begins and ends with whole blocks of queries and keys. TILES int32 [., 4]: see `item`. OUT [P, H, D].
    """
    ready()
    tile, head = TILES + 4 * tl.program_id(0), tl.program_id(1).to(tl.int64)
    at, start, length, first = item(tile)
    one: tl.constexpr = max(D - L, 0)
    dtype: tl.constexpr = LOW.dtype.element_ty
    keys = (length + BN - 1) // BN * BN
    q, k, v = head * padded + at, (H + head) * padded + at, (2 * H + head) * padded + at
    q_low, q_rest = block(LOW + q * L, first, BM, L, False, False), block(REST + q * R, first, BM, R, False, False)
    K_LOW, V_LOW, K_REST, V_REST = LOW + k * L, LOW + v * L, REST + k * R, REST + v * R
    begun = scored(q_low, K_LOW, 0, tl.zeros([BM, BN], tl.float32), BN, False)
    best = tl.max(scored(q_rest, K_REST, 0, begun, BN, False), 1)
    measure = (tl.arange(0, R) == one)[None, :]
    low, rest = tl.zeros([BM, L], tl.float32), tl.zeros([BM, R], tl.float32)
    low, rest = quick(
        q_low, tl.where(measure, rounded(-best, dtype)[:, None], q_rest), begun, table(K_LOW, keys, BN, L, TMA),
        table(K_REST, keys, BN, R, TMA), table(V_LOW, keys, BN, L, TMA), table(V_REST, keys, BN, R, TMA), keys, low,
        rest, BN, AHEAD, STAGES, TMA,
    )  # fmt: skip
    total = tl.sum(tl.where(measure, rest, 0.0), 1)
    # Not a number is not good either. A column, as Triton 3.6 fails for Blackwell on a row made into one number.
    good = (total > 2.0**-60) & (total < 2.0**100)
    at, start, length, first = item(tile)
    if tl.min(good.to(tl.int32)[:, None], 0).item() == 0:
        k, v = (H + head) * padded + at, (2 * H + head) * padded + at
        low, rest = careful(
            q_low, q_rest, LOW + k * L, REST + k * R, LOW + v * L, REST + v * R, length, low, rest, BN
        )  # fmt: skip
        total = tl.sum(tl.where(measure, rest, 0.0), 1)
    i, c, r = first + tl.arange(0, BM), tl.arange(0, L), L + tl.arange(0, R)
    out = OUT + ((start + i).to(tl.int64) * H + head)[:, None] * D
    there = (i < length)[:, None]
    tl.store(out + c[None, :], rounded(low / total[:, None], dtype), mask=there & (c < D)[None, :])
    tl.store(out + r[None, :], rounded(rest / total[:, None], dtype), mask=there & (r < D)[None, :])
