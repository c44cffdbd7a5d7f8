"""Decode attention in Gluon for Hopper: four warps do nothing but fetch pages into a ring; two groups of four attend,
each with half of the latents as its values. So pages are on their way while another is at work.

Up to 32 query rows a program keys are the M side of both products, as in `split`, and each group computes all scores.
At 64 the rows are, and each group computes the scores of half of a page's tokens.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

# Triton 3.9 calls it otherwise than 3.6.
fetch = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


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


@gluon.jit
def _halved(
    i, G: gl.constexpr, halves, ropes, q_lat, q_pe, full, mma: gl.constexpr, P: gl.constexpr, BLOCK: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK, P / 2] of half G of the tokens of the ring's page i, as soon as it is there."""
    one, two = 2 * i, 2 * i + 1
    s = gl.full([BLOCK, P // 2], 0.0, gl.float32, mma)
    mbarrier.wait(full.index(one % SLOTS), (one // SLOTS) & 1)
    fence_async_shared()
    keys = halves.index(one % SLOTS).slice(G * (P // 2), P // 2).permute((1, 0))
    s = warpgroup_mma(q_lat.index(0), keys, s, is_async=True)
    keys = ropes.index(i % ((SLOTS + 1) // 2)).slice(G * (P // 2), P // 2).permute((1, 0))
    s = warpgroup_mma(q_pe, keys, s, is_async=True)
    mbarrier.wait(full.index(two % SLOTS), (two // SLOTS) & 1)
    fence_async_shared()
    keys = halves.index(two % SLOTS).slice(G * (P // 2), P // 2).permute((1, 0))
    s = warpgroup_mma(q_lat.index(1), keys, s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _attended_wide(
    G: gl.constexpr, Q_LAT, Q_PE, OUT, STATE, PREFIX, VISIBLE, b, share, block, low, high, first, count, length, scale,
    tokens, halves, ropes, q_lat, q_pe, weights, peaks, full, empty, there, met, H: gl.constexpr, L: gl.constexpr,
    R: gl.constexpr, P: gl.constexpr, BLOCK: gl.constexpr, ALONE: gl.constexpr, TREE: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Four warps, query rows on the M side: scores of half G of a page's tokens, values of half G of the latents. The
    groups tell each other their largest scores, then their weights."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P // 2, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L // 2, 16])
    if G == 0:
        _asked(Q_LAT, Q_PE, first.to(gl.int64) * H, block * BLOCK, count * H, q_lat, q_pe, there, L, R, BLOCK)
    r = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
    ok = r < count * H
    limit = length - count + 1 + r // H
    token = G * (P // 2) + gl.arange(0, P // 2, gl.SliceLayout(0, mma))
    if TREE:
        prefix = gl.load(PREFIX + b)
        visible = gl.load(VISIBLE + first + r // H, mask=ok, other=0)
    best = gl.full([BLOCK], -1e30, gl.float32, gl.SliceLayout(1, mma))
    total = gl.full([BLOCK], 0.0, gl.float32, gl.SliceLayout(1, mma))
    acc = gl.full([BLOCK, L // 2], 0.0, gl.float32, wide)
    mbarrier.wait(there, 0)
    for p in range(low, high):
        i = p - low
        scores = _halved(i, G, halves, ropes, q_lat, q_pe, full, mma, P, BLOCK, SLOTS) * scale
        mbarrier.arrive(empty.index((2 * i + 1 - G) % SLOTS))
        keys = p * P + token
        if TREE:
            node = keys - prefix
            bits = (visible[:, None] >> (node & 63).to(gl.int64)[None, :]) & 1
            below = (node < 64) & (keys < length)
            scores = gl.where((node < 0)[None, :] | (below[None, :] & (bits != 0)), scores, -1e30)
        else:
            scores = gl.where(keys[None, :] < limit[:, None], scores, -1e30)
        most = gl.max(scores, 1)
        peaks.index(G).store(most)
        mbarrier.arrive(met.index(0))
        mbarrier.wait(met.index(0), i & 1)
        new = gl.maximum(best, gl.maximum(most, peaks.index(1 - G).load(gl.SliceLayout(1, mma))))
        chances = gl.where(scores > -1e29, gl.exp2(scores - new[:, None]), 0.0)
        fade = gl.exp2(best - new)
        total = total * fade + gl.sum(chances, 1)
        weights.index(G).store(chances.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(met.index(1))
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, wide))[:, None]
        mbarrier.wait(met.index(1), i & 1)
        mine = (2 * i + G) % SLOTS
        values = halves.index(mine)
        acc = warpgroup_mma(weights.index(0), values.slice(0, P // 2), acc, is_async=True)
        acc = warpgroup_mma(weights.index(1), values.slice(P // 2, P // 2), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(mine))
        best = new
    peaks.index(G).store(total)
    mbarrier.arrive(met.index(0))
    mbarrier.wait(met.index(0), gl.maximum(high - low, 0) & 1)
    total += peaks.index(1 - G).load(gl.SliceLayout(1, mma))
    n = G * (L // 2) + gl.arange(0, L // 2, gl.SliceLayout(0, wide))
    row = first.to(gl.int64) * H + block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, wide))
    seen = gl.convert_layout(ok, gl.SliceLayout(1, wide))[:, None]
    if ALONE:
        acc = acc / gl.convert_layout(gl.where(total > 0, total, 1.0), gl.SliceLayout(1, wide))[:, None]
        gl.store(OUT + row[:, None] * L + n[None, :], acc.to(OUT.dtype.element_ty), mask=seen)
    else:
        part = share.to(gl.int64) * tokens * H
        if G == 0:
            state = STATE + 2 * (part + first.to(gl.int64) * H + r)
            gl.store(state, best, mask=ok)
            gl.store(state + 1, total, mask=ok)
        if low < high:
            at = part + row
            gl.store(OUT + at[:, None] * L + n[None, :], acc, mask=seen)


@gluon.jit(do_not_specialize=["pages_row", "splits", "scale", "tokens"])
def streamed(
    Q_LAT, Q_PE, ROWS, PAGES, CU_Q, LENGTHS, OUT, STATE, pages_row, splits, scale, tokens, PREFIX, VISIBLE,
    H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, P: gl.constexpr, BLOCK: gl.constexpr, ALONE: gl.constexpr,
    TREE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """`split` for sm90, bf16 rows and sizes that are powers of two. The ring has SLOTS halves of a page, each
    [P, L / 2], and as many rotary parts as pages can be in it: a page's first slot is free only after the scores of
    the page that had its rotary part."""
    # And lets the next kernel begin when it ends, not before: its programs would crowd on the few processors that this
    # one, which takes all the registers of the others, leaves free.
    gdc_wait()
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
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    there = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(there, count=1)
    if BLOCK < 64:
        weights = gl.allocate_shared_memory(gl.bfloat16, [2, P, BLOCK], gl.NVMMASharedLayout(2 * BLOCK, 16, 2))
        gl.warp_specialize(
            [
                (_attended, (
                    0, Q_LAT, Q_PE, OUT, STATE, PREFIX, VISIBLE, b, share, block, low, high, first, count, length,
                    scale, tokens, halves, ropes, q_lat, q_pe, weights.index(0), full, empty, there, H, L, R, P, BLOCK,
                    ALONE, TREE, SLOTS,
                )),
                (_attended, (
                    1, Q_LAT, Q_PE, OUT, STATE, PREFIX, VISIBLE, b, share, block, low, high, first, count, length,
                    scale, tokens, halves, ropes, q_lat, q_pe, weights.index(1), full, empty, there, H, L, R, P, BLOCK,
                    ALONE, TREE, SLOTS,
                )),
                (_fetched, (
                    ROWS, PAGES + b * pages_row, low, high, length, halves, ropes, full, empty, L, R, P, SLOTS,
                )),
            ],
            [4, 4],
            [200, 64],
        )  # fmt: skip
    else:
        weights = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, P // 2], gl.NVMMASharedLayout(P, 16, 2))
        peaks = gl.allocate_shared_memory(gl.float32, [2, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        met = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(met.index(i), count=2)
        gl.warp_specialize(
            [
                (_attended_wide, (
                    0, Q_LAT, Q_PE, OUT, STATE, PREFIX, VISIBLE, b, share, block, low, high, first, count, length,
                    scale, tokens, halves, ropes, q_lat, q_pe, weights, peaks, full, empty, there, met, H, L, R, P,
                    BLOCK, ALONE, TREE, SLOTS,
                )),
                (_attended_wide, (
                    1, Q_LAT, Q_PE, OUT, STATE, PREFIX, VISIBLE, b, share, block, low, high, first, count, length,
                    scale, tokens, halves, ropes, q_lat, q_pe, weights, peaks, full, empty, there, met, H, L, R, P,
                    BLOCK, ALONE, TREE, SLOTS,
                )),
                (_fetched, (
                    ROWS, PAGES + b * pages_row, low, high, length, halves, ropes, full, empty, L, R, P, SLOTS,
                )),
            ],
            [4, 4],
            [216, 72],
        )  # fmt: skip
