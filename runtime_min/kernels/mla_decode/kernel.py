"""Attention of few query tokens over the paged latent cache: split along the context, then combined.

Keys are the M side of both products: a page of latent rows is loaded once and serves as keys and as values, and a
handful of query rows (token and head) wastes nothing. A program takes one sequence, one share of its pages, one block
of rows.

`split` runs anywhere; `streamed` is the same for Hopper.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import dot, ready, rounded
from runtime_min.kernels.mla_decode.hopper_device import streamed as streamed


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
