"""Choice and weights of the routed experts: one program a token."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import ready


@triton.jit(do_not_specialize=["scale"])
def choose(
    LOGITS, BIAS, IDS, WEIGHTS, scale, E: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr
):
    """Grid: tokens, whose logits are ROW apart. The best of what is left, TOP_K times; of equals the lowest id."""
    ready()
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    scores = 1 / (1 + tl.exp(-tl.load(LOGITS + t * ROW + e, mask=e < E, other=0.0)))
    left = tl.where(e < E, scores + tl.load(BIAS + e, mask=e < E, other=0.0), float("-inf"))
    place = tl.arange(0, triton.next_power_of_2(TOP_K))
    ids = tl.zeros([triton.next_power_of_2(TOP_K)], tl.int32)
    chosen = tl.zeros([triton.next_power_of_2(TOP_K)], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.min(tl.where(left == tl.max(left, 0), e, BLOCK), 0)
        ids = tl.where(place == i, best, ids)
        chosen = tl.where(place == i, tl.sum(tl.where(e == best, scores, 0.0), 0), chosen)
        left = tl.where(e == best, float("-inf"), left)
    weights = chosen / (tl.sum(chosen, 0) + 1e-20) * scale
    tl.store(IDS + t * TOP_K + place, ids, mask=place < TOP_K)
    tl.store(WEIGHTS + t * TOP_K + place, weights, mask=place < TOP_K)
