"""RMSNorm of rows, with a residual added first if there is one. One program a row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import ready, rounded


@triton.jit(do_not_specialize=["eps", "x_row"])
def rows(X, RESIDUAL, WEIGHT, TOTAL, Y, eps, x_row, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """Y[t] = norm(s) * WEIGHT with s = X[t], or X[t] + RESIDUAL[t] rounded, which then goes to TOTAL[t]."""
    ready()
    t = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    seen = at < H
    x = tl.load(X + t * x_row + at, mask=seen, other=0.0)
    if ADD:
        x = rounded(x.to(tl.float32) + tl.load(RESIDUAL + t * H + at, mask=seen, other=0.0).to(tl.float32), x.dtype)
        tl.store(TOTAL + t * H + at, x, mask=seen)
    w = x.to(tl.float32)
    normed = w * tl.rsqrt(tl.sum(w * w, 0) / H + eps)
    weight = tl.load(WEIGHT + at, mask=seen, other=0.0)
    y = rounded(normed, x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(Y + t * H + at, rounded(y, Y.dtype.element_ty), mask=seen)
