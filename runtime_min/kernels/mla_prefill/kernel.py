"""Causal attention of many query tokens over one chunk of expanded keys and values of one sequence.

Chunks of a long context come one after another; between them a row's sum, largest score and sum of weights wait in
scratch. Keys are in two parts: what a head's latent expands to, and the rotary key that all heads share.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import dot, ready, rounded


@triton.jit
def step(
    q_nope, q_pe, K_NOPE, K_PE, V, start, keys, limit, scale, best, total, acc, EDGE: tl.constexpr, k_row, pe_row,
    D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, VD: tl.constexpr, BV: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Takes in the keys start..start + BN. Only at the EDGE may some of them be unseen by some rows."""
    key = start + tl.arange(0, BN)
    d, r, v = tl.arange(0, BD), tl.arange(0, BR), tl.arange(0, BV)
    there = key < keys
    k = tl.load(
        K_NOPE + key[None, :].to(tl.int64) * k_row + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0
    )
    scores = dot(q_nope, k, tl.zeros([q_nope.shape[0], BN], tl.float32))
    k = tl.load(
        K_PE + key[None, :].to(tl.int64) * pe_row + r[:, None], mask=there[None, :] & (r < R)[:, None], other=0.0
    )
    scores = dot(q_pe, k, scores) * scale
    if EDGE:
        scores = tl.where((key[None, :] < limit[:, None]) & there[None, :], scores, -1e30)
    new = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    if EDGE:
        weights = tl.where(scores > -1e29, weights, 0.0)
    fade = tl.exp2(best - new)
    values = tl.load(
        V + key[:, None].to(tl.int64) * k_row + v[None, :], mask=there[:, None] & (v < VD)[None, :], other=0.0
    )
    acc = dot(rounded(weights, values.dtype), values, acc * fade[:, None])
    return new, total * fade + tl.sum(weights, 1), acc


@triton.jit(do_not_specialize=["queries", "keys", "behind", "scale", "q_row", "q_pe_row", "k_row", "pe_row"])
def attend(
    Q_NOPE, Q_PE, K_NOPE, K_PE, V, OUT, ACC, STATE, queries, keys, behind, scale, q_row, q_pe_row, k_row, pe_row,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, VD: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of BM queries, heads. Query i sees the chunk's keys below behind + i + 1 (may be none, or all).

    Q_NOPE [queries, H, D] and Q_PE [queries, H, R] with rows q_row and q_pe_row apart; K_NOPE and V [keys, H, .] with
    rows k_row apart; K_PE [keys, R] with rows pe_row apart: all multiples of 8. ACC fp32 [queries, H, VD] and STATE
    fp32 [queries, H, 2] carry unfinished rows from chunk to chunk; OUT [queries, H, VD] is written by the LAST one.
    scale is in units of log 2.
    """
    ready()
    # The compiler learns that rows begin on 16 bytes, and loads by them.
    q_row, q_pe_row, k_row, pe_row = q_row // 8 * 8, q_pe_row // 8 * 8, k_row // 8 * 8, pe_row // 8 * 8
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    i = block * BM + tl.arange(0, BM)
    ok = i < queries
    d, r, v = tl.arange(0, BD), tl.arange(0, BR), tl.arange(0, BV)
    at = i.to(tl.int64)
    q_nope = tl.load(
        Q_NOPE + at[:, None] * q_row + head * D + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0
    )
    q_pe = tl.load(
        Q_PE + at[:, None] * q_pe_row + head * R + r[None, :], mask=ok[:, None] & (r < R)[None, :], other=0.0
    )
    row = at * H + head
    cells = row[:, None] * VD + v[None, :]
    seen = ok[:, None] & (v < VD)[None, :]
    if FIRST:
        best = tl.full([BM], -1e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BV], tl.float32)
    else:
        best = tl.load(STATE + 2 * row, mask=ok, other=-1e30)
        total = tl.load(STATE + 2 * row + 1, mask=ok, other=0.0)
        acc = tl.load(ACC + cells, mask=seen, other=0.0)
    limit = behind + i + 1
    end = tl.minimum(keys, behind + block * BM + BM)
    inner = tl.maximum(0, tl.minimum(keys, behind + block * BM + 1) // BN * BN)
    K_NOPE += head * D
    V += head * VD
    for start in tl.range(0, inner, BN, num_stages=STAGES):
        best, total, acc = step(
            q_nope, q_pe, K_NOPE, K_PE, V, start, keys, limit, scale, best, total, acc, False, k_row, pe_row,
            D, BD, R, BR, VD, BV, BN,
        )  # fmt: skip
    for start in tl.range(inner, end, BN, num_stages=1):
        best, total, acc = step(
            q_nope, q_pe, K_NOPE, K_PE, V, start, keys, limit, scale, best, total, acc, True, k_row, pe_row,
            D, BD, R, BR, VD, BV, BN,
        )  # fmt: skip
    if LAST:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(OUT + cells, rounded(acc, OUT.dtype.element_ty), mask=seen)
    else:
        tl.store(STATE + 2 * row, best, mask=ok)
        tl.store(STATE + 2 * row + 1, total, mask=ok)
        tl.store(ACC + cells, acc, mask=seen)
