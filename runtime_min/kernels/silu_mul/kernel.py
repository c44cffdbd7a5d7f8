"""silu(gate) * up of rows."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import ready, rounded


@triton.jit(do_not_specialize=["row"])
def rows(X, Y, row, F: tl.constexpr, BLOCK: tl.constexpr):
    """Y[t, f] = silu(X[t, f]) * X[t, F + f]. Grid: tokens, blocks of F."""
    ready()
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(X + t * row + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(X + t * row + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(Y + t * F + f, rounded(gate / (1 + tl.exp(-gate)) * up, Y.dtype.element_ty), mask=f < F)
