"""Rotary positions, the latent's norm and the write of a token's row into the latent cache: one program a token."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from runtime_min.kernels.compat import ready, rounded


@triton.jit(do_not_specialize=["eps", "q_row", "q_head", "k_row", "latent_row"])
def rows(
    Q, KEY, LATENT, GAMMA, COS, SIN, POSITIONS, SLOTS, CACHE, OUT, eps, q_row, q_head, k_row, latent_row,
    H: tl.constexpr, BH: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, L: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """R counts pairs. OUT [T, H, 2 R]; CACHE [rows, L + 2 R] at SLOTS[t], nothing where that is negative."""
    ready()
    t = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(POSITIONS + t), tl.load(SLOTS + t)
    i = tl.arange(0, BR)
    cos = tl.load(COS + position * R + i, mask=i < R, other=0.0)
    sin = tl.load(SIN + position * R + i, mask=i < R, other=0.0)
    h = tl.arange(0, BH)
    seen = (h < H)[:, None] & (i < R)[None, :]
    q = Q + t * q_row + h[:, None] * q_head + 2 * i[None, :]
    even, odd = tl.load(q, mask=seen, other=0.0).to(tl.float32), tl.load(q + 1, mask=seen, other=0.0).to(tl.float32)
    out = OUT + (t * H + h[:, None]) * (2 * R) + 2 * i[None, :]
    dtype: tl.constexpr = OUT.dtype.element_ty
    tl.store(out, rounded(even * cos[None, :] - odd * sin[None, :], dtype), mask=seen)
    tl.store(out + 1, rounded(odd * cos[None, :] + even * sin[None, :], dtype), mask=seen)
    if slot >= 0:
        row = CACHE + slot * (L + 2 * R)
        n = tl.arange(0, BL)
        x = tl.load(LATENT + t * latent_row + n, mask=n < L, other=0.0).to(tl.float32)
        normed = rounded(x * tl.rsqrt(tl.sum(x * x, 0) / L + eps), LATENT.dtype.element_ty).to(tl.float32)
        gamma = tl.load(GAMMA + n, mask=n < L, other=0.0).to(tl.float32)
        tl.store(row + n, rounded(normed * gamma, dtype), mask=n < L)
        k = KEY + t * k_row + 2 * i
        k_even = tl.load(k, mask=i < R, other=0.0).to(tl.float32)
        k_odd = tl.load(k + 1, mask=i < R, other=0.0).to(tl.float32)
        tl.store(row + L + 2 * i, rounded(k_even * cos - k_odd * sin, dtype), mask=i < R)
        tl.store(row + L + 2 * i + 1, rounded(k_odd * cos + k_even * sin, dtype), mask=i < R)
