"""Rotary positions of packed pictures: 4 bytes moved an element of q and k (bf16), nothing computed to speak of."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import ready, rounded


@triton.jit(do_not_specialize=["count"])
def rope(QKV, COS, SIN, count, H: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, ROWS: tl.constexpr):
    """Rotates the pairs of queries and keys in place. QKV [P, 3, H, 2 R]; COS, SIN fp32 [P, R]; count is 2 P H.

    Grid: blocks of ROWS heads of queries and keys, which lie side by side in a patch.
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
