"""Attention of few query tokens over the paged latent cache: split along the context, then combined.

Keys are the M side of both products: a page of latent rows is loaded once and serves as keys and as values, and a
handful of query rows (token and head) wastes nothing. A program takes one sequence, one share of its pages, one block
of rows.

`split` runs anywhere; `streamed` is the same for Hopper: four warps do nothing but fetch pages into a ring, and two
groups of four attend, each with half of the latents as its values. So a page is on its way while another is at work.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from runtime_min.kernels.compat import dot, ready, rounded

# Triton 3.9 calls it otherwise than 3.6.
fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@triton.jit(do_not_specialize=["pages_row", "splits", "scale", "tokens"])
def split(
    Q_LAT, Q_PE, ROWS, PAGES, CU_Q, LENGTHS, OUT, STATE, pages_row, splits, scale, tokens, PREFIX, VISIBLE,
    H: tl.constexpr, L: tl.constexpr, BL: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, P: tl.constexpr,
    BLOCK: tl.constexpr, ALONE: tl.constexpr, STAGES: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Grid: sequences, splits, blocks of BLOCK rows. scale is in units of log 2.

    ALONE: OUT [T, H, L] is the result. Else OUT fp32 [splits, T, H, L] holds sums of weights times values, and STATE
    fp32 [splits, T, H, 2] the largest score and the sum of weights. TREE: a query sees keys before PREFIX[b], and key
    PREFIX[b] + j where bit j of VISIBLE [T] is set; PREFIX and VISIBLE are not looked at otherwise.
    """
    ready()
    b, share, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(CU_Q + b)
    count = tl.load(CU_Q + b + 1) - first
    if block * BLOCK >= count * H:
        return
    length = tl.load(LENGTHS + b)
    pages = tl.cdiv(length, P)
    each = tl.cdiv(pages, splits)
    low = share * each
    high = tl.minimum(low + each, pages)
    r = block * BLOCK + tl.arange(0, BLOCK)
    ok = r < count * H
    row = first.to(tl.int64) * H + r
    n, k, token = tl.arange(0, BL), tl.arange(0, BR), tl.arange(0, P)
    q_lat = tl.load(Q_LAT + row[None, :] * L + n[:, None], mask=ok[None, :] & (n < L)[:, None], other=0.0)
    q_pe = tl.load(Q_PE + row[None, :] * R + k[:, None], mask=ok[None, :] & (k < R)[:, None], other=0.0)
    limit = length - count + 1 + r // H
    if TREE:
        prefix = tl.load(PREFIX + b)
        visible = tl.load(VISIBLE + first + r // H, mask=ok, other=0)
    best = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BL, BLOCK], tl.float32)
    for p in tl.range(low, high, num_stages=STAGES):
        base = ROWS + tl.load(PAGES + b * pages_row + p).to(tl.int64) * (P * (L + R))
        place = base + token[:, None] * (L + R)
        # What lies beyond the length belongs to nobody and may be anything, NaN too.
        there = (p * P + token < length)[:, None]
        if BL == L and BR == R:
            latent = tl.load(place + n[None, :], mask=there, other=0.0)
            rope = tl.load(place + L + k[None, :], mask=there, other=0.0)
        else:
            latent = tl.load(place + n[None, :], mask=there & (n < L)[None, :], other=0.0)
            rope = tl.load(place + L + k[None, :], mask=there & (k < R)[None, :], other=0.0)
        scores = dot(latent, q_lat, tl.zeros([P, BLOCK], tl.float32))
        scores = dot(rope, q_pe, scores) * scale
        if TREE:
            node = p * P + token - prefix
            bits = (visible[None, :] >> (node & 63).to(tl.int64)[:, None]) & 1
            below = (node < 64) & (p * P + token < length)
            scores = tl.where((node < 0)[:, None] | (below[:, None] & (bits != 0)), scores, -1e30)
        else:
            scores = tl.where((p * P + token)[:, None] < limit[None, :], scores, -1e30)
        new = tl.maximum(best, tl.max(scores, 0))
        weights = tl.where(scores > -1e29, tl.exp2(scores - new[None, :]), 0.0)
        fade = tl.exp2(best - new)
        total = total * fade + tl.sum(weights, 0)
        acc = dot(tl.trans(latent), rounded(weights, latent.dtype), acc * fade[None, :])
        best = new
    seen = ok[None, :] & (n < L)[:, None]
    if ALONE:
        acc = acc / tl.where(total > 0, total, 1.0)[None, :]
        tl.store(OUT + row[None, :] * L + n[:, None], rounded(acc, OUT.dtype.element_ty), mask=seen)
    else:
        at = share.to(tl.int64) * tokens * H + row
        tl.store(STATE + 2 * at, best, mask=ok)
        tl.store(STATE + 2 * at + 1, total, mask=ok)
        if low < high:
            tl.store(OUT + at[None, :] * L + n[:, None], acc, mask=seen)


@gluon.jit
def _fetched(
    ROWS, PAGES, low, high, length, halves, ropes, full, empty,
    L: gl.constexpr, R: gl.constexpr, P: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Four warps: pages low..high of PAGES into the ring, half by half, zeros beyond the length; the rotary keys go
    with the first half."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [512 // L, L // 16], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // R, R // 8], [4, 1], [1, 0])
    token = gl.arange(0, P, gl.SliceLayout(1, wide))
    latents = token[:, None] * (L + R) + gl.arange(0, L // 2, gl.SliceLayout(0, wide))[None, :]
    other = gl.arange(0, P, gl.SliceLayout(1, narrow))
    keys = other[:, None] * (L + R) + L + gl.arange(0, R, gl.SliceLayout(0, narrow))[None, :]
    page = gl.load(PAGES + low, mask=low < high, other=0)
    for p in range(low, high):
        base = ROWS + page.to(gl.int64) * (P * (L + R))
        page = gl.load(PAGES + p + 1, mask=p + 1 < high, other=0)
        left = length - p * P
        for h in gl.static_range(2):
            at = 2 * (p - low) + h
            slot = at % SLOTS
            mbarrier.wait(empty.index(slot), ((at // SLOTS) & 1) ^ 1)
            fetch(halves.index(slot), base + h * (L // 2) + latents, mask=(token < left)[:, None])
            if h == 0:
                fetch(ropes.index((p - low) % ((SLOTS + 1) // 2)), base + keys, mask=(other < left)[:, None])
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def _asked(
    Q_LAT, Q_PE, row, start, rows, q_lat, q_pe, there, L: gl.constexpr, R: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """The block's queries into shared memory, in halves of the latents; zeros from `rows` on."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [512 // L, L // 16], [4, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // R, R // 8], [4, 1], [1, 0])
    r = start + gl.arange(0, BLOCK, gl.SliceLayout(1, wide))
    latents = Q_LAT + (row + r)[:, None] * L + gl.arange(0, L // 2, gl.SliceLayout(0, wide))[None, :]
    for h in gl.static_range(2):
        q_lat.index(h).store(gl.load(latents + h * (L // 2), mask=(r < rows)[:, None], other=0.0))
    r = start + gl.arange(0, BLOCK, gl.SliceLayout(1, narrow))
    keys = Q_PE + (row + r)[:, None] * R + gl.arange(0, R, gl.SliceLayout(0, narrow))[None, :]
    q_pe.store(gl.load(keys, mask=(r < rows)[:, None], other=0.0))
    fence_async_shared()
    mbarrier.arrive(there)


@gluon.jit
def _scores(
    i, halves, ropes, q_lat, q_pe, full, mma: gl.constexpr, P: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr
):
    """fp32 [P, BLOCK] of the ring's page i, as soon as it is there."""
    one, two = 2 * i, 2 * i + 1
    s = gl.full([P, BLOCK], 0.0, gl.float32, mma)
    mbarrier.wait(full.index(one % SLOTS), (one // SLOTS) & 1)
    fence_async_shared()
    s = warpgroup_mma(halves.index(one % SLOTS), q_lat.index(0).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(ropes.index(i % ((SLOTS + 1) // 2)), q_pe.permute((1, 0)), s, is_async=True)
    mbarrier.wait(full.index(two % SLOTS), (two // SLOTS) & 1)
    fence_async_shared()
    s = warpgroup_mma(halves.index(two % SLOTS), q_lat.index(1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _attended(
    G: gl.constexpr, Q_LAT, Q_PE, OUT, STATE, PREFIX, VISIBLE, b, share, block, low, high, first, count, length, scale,
    tokens, halves, ropes, q_lat, q_pe, weights, full, empty, there, H: gl.constexpr, L: gl.constexpr, R: gl.constexpr,
    P: gl.constexpr, BLOCK: gl.constexpr, ALONE: gl.constexpr, TREE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Four warps: scores of every page, and values of half G of the latents; the other half is free after scores."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    if G == 0:
        _asked(Q_LAT, Q_PE, first.to(gl.int64) * H, block * BLOCK, count * H, q_lat, q_pe, there, L, R, BLOCK)
    r = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, mma))
    ok = r < count * H
    limit = length - count + 1 + r // H
    token = gl.arange(0, P, gl.SliceLayout(1, mma))
    if TREE:
        prefix = gl.load(PREFIX + b)
        visible = gl.load(VISIBLE + first + r // H, mask=ok, other=0)
    best = gl.full([BLOCK], -1e30, gl.float32, gl.SliceLayout(0, mma))
    total = gl.full([BLOCK], 0.0, gl.float32, gl.SliceLayout(0, mma))
    acc = gl.full([L // 2, BLOCK], 0.0, gl.float32, mma)
    mbarrier.wait(there, 0)
    for p in range(low, high):
        i = p - low
        scores = _scores(i, halves, ropes, q_lat, q_pe, full, mma, P, BLOCK, SLOTS) * scale
        mbarrier.arrive(empty.index((2 * i + 1 - G) % SLOTS))
        keys = p * P + token
        if TREE:
            node = keys - prefix
            bits = (visible[None, :] >> (node & 63).to(gl.int64)[:, None]) & 1
            below = (node < 64) & (keys < length)
            scores = gl.where((node < 0)[:, None] | (below[:, None] & (bits != 0)), scores, -1e30)
        else:
            scores = gl.where(keys[:, None] < limit[None, :], scores, -1e30)
        new = gl.maximum(best, gl.max(scores, 0))
        chances = gl.where(scores > -1e29, gl.exp2(scores - new[None, :]), 0.0)
        fade = gl.exp2(best - new)
        total = total * fade + gl.sum(chances, 0)
        weights.store(chances.to(gl.bfloat16))
        fence_async_shared()
        mine = (2 * i + G) % SLOTS
        acc = warpgroup_mma(halves.index(mine).permute((1, 0)), weights, acc * fade[None, :])
        mbarrier.arrive(empty.index(mine))
        best = new
    n = G * (L // 2) + gl.arange(0, L // 2, gl.SliceLayout(1, mma))
    row = first.to(gl.int64) * H + r
    if ALONE:
        acc = acc / gl.where(total > 0, total, 1.0)[None, :]
        gl.store(OUT + row[None, :] * L + n[:, None], acc.to(OUT.dtype.element_ty), mask=ok[None, :])
    else:
        at = share.to(gl.int64) * tokens * H + row
        if G == 0:
            gl.store(STATE + 2 * at, best, mask=ok)
            gl.store(STATE + 2 * at + 1, total, mask=ok)
        if low < high:
            gl.store(OUT + at[None, :] * L + n[:, None], acc, mask=ok[None, :])


@gluon.jit(do_not_specialize=["pages_row", "splits", "scale", "tokens"])
def streamed(
    Q_LAT, Q_PE, ROWS, PAGES, CU_Q, LENGTHS, OUT, STATE, pages_row, splits, scale, tokens, PREFIX, VISIBLE,
    H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, P: gl.constexpr, BLOCK: gl.constexpr, ALONE: gl.constexpr,
    TREE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """`split` for sm90, bf16 rows and sizes that are powers of two. The ring has SLOTS halves of a page, each
    [P, L / 2], and as many rotary parts as pages can be in it: a page's first slot is free only after the scores of
    the page that had its rotary part."""
    gdc_wait()
    gdc_launch_dependents()
    b, share, block = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    first = gl.load(CU_Q + b)
    count = gl.load(CU_Q + b + 1) - first
    length = gl.load(LENGTHS + b)
    pages = (length + P - 1) // P
    each = (pages + splits - 1) // splits
    low = share * each
    high = gl.minimum(low + each, pages)
    if block * BLOCK >= count * H:
        high = low
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    halves = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, P, L // 2], tile)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [(SLOTS + 1) // 2, P, R], tile)
    q_lat = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, L // 2], tile)
    q_pe = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, R], tile)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, P, BLOCK], gl.NVMMASharedLayout(2 * BLOCK, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(there, count=1)
    gl.warp_specialize(
        [
            (_attended, (
                0, Q_LAT, Q_PE, OUT, STATE, PREFIX, VISIBLE, b, share, block, low, high, first, count, length, scale,
                tokens, halves, ropes, q_lat, q_pe, weights.index(0), full, empty, there, H, L, R, P, BLOCK, ALONE,
                TREE, SLOTS,
            )),
            (_attended, (
                1, Q_LAT, Q_PE, OUT, STATE, PREFIX, VISIBLE, b, share, block, low, high, first, count, length, scale,
                tokens, halves, ropes, q_lat, q_pe, weights.index(1), full, empty, there, H, L, R, P, BLOCK, ALONE,
                TREE, SLOTS,
            )),
            (_fetched, (
                ROWS, PAGES + b * pages_row, low, high, length, halves, ropes, full, empty, L, R, P, SLOTS,
            )),
        ],
        [4, 4],
        [200, 64],
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "tokens"])
def combine(
    PARTS, STATE, OUT, splits, tokens, H: tl.constexpr, L: tl.constexpr, BL: tl.constexpr, BS: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """OUT [T, H, L] from what `split` left, in the order of the context; BS is at least splits. Grid: tokens times
    heads, blocks of BL values."""
    ready()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BL + tl.arange(0, BL)
    every = tl.arange(0, BS)
    place = every.to(tl.int64) * tokens * H + row
    all_sums = tl.load(STATE + 2 * place + 1, mask=every < splits, other=0.0)
    peaks = tl.load(STATE + 2 * place, mask=every < splits, other=-1e30)
    best = tl.max(tl.where(all_sums > 0, peaks, -1e30), 0)
    total = tl.sum(tl.where(all_sums > 0, all_sums * tl.exp2(peaks - best), 0.0), 0)
    acc = tl.zeros([BL], tl.float32)
    for first in tl.range(0, splits, BATCH, num_stages=2):
        s = first + tl.arange(0, BATCH)
        at = s.to(tl.int64) * tokens * H + row
        sums = tl.load(STATE + 2 * at + 1, mask=s < splits, other=0.0)
        weight = tl.where(sums > 0, tl.exp2(tl.load(STATE + 2 * at, mask=s < splits, other=-1e30) - best), 0.0)
        parts = tl.load(PARTS + at[:, None] * L + n[None, :], mask=(sums > 0)[:, None] & (n < L)[None, :], other=0.0)
        acc += tl.sum(parts * weight[:, None], 0)
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(OUT + row * L + n, rounded(acc, OUT.dtype.element_ty), mask=n < L)
