"""The one place that knows what the CPU interpreter of Triton and older GPUs cannot do. Imported by device code only.

In the interpreter tl.dot on bf16 operands returns garbage silently, so `dot` widens them there; rounding fp32 to bf16
truncates, which tests allow for. From sm90 on a kernel may be launched while the one before it still runs: every
kernel calls `ready` in every program before it touches what others wrote or read.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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


@tl.core.builtin
def overlaps(_semantic=None):
    """Can the GPU that is compiled for, not the one that is here, launch a kernel before the one before it ends?"""
    return tl.constexpr(int(_semantic.builder.options.arch.removeprefix("sm").rstrip("abf")) >= 90)


@triton.jit
def ready():
    """Waits until every kernel launched before has ended and its results are seen; then lets the next one begin.

    A program that returns without it would let the next kernel begin, and not wait, while what came before this one
    still runs. Where launches do not overlap it does nothing.
    """
    if not INTERPRET and overlaps():
        gdc_wait()
        gdc_launch_dependents()
