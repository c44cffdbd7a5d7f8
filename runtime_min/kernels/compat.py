"""The one place that knows what the CPU interpreter of Triton cannot do. Imported by device code only.

In the interpreter tl.dot on bf16 operands returns garbage silently, so `dot` widens them there; rounding fp32 to bf16
truncates, which tests allow for. `inner_dot` is written for operands of any float type.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os

import triton
import triton.language as tl

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation; bf16, fp16 or fp32 operands."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 x to `dtype`, to nearest even; the interpreter would cut bf16 off."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(dtype)
