"""RMSNorm, with and without a residual, against its definition."""

import pytest
import torch

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.rmsnorm import launch, ref

DTYPES = [torch.float32, torch.bfloat16]
# fp32: order of one sum. bf16: the normed row may round to the other neighbour, 2^-8 of it.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [96, 192, 7168])
def test_rmsnorm(device: str, dtype: torch.dtype, hidden: int) -> None:
    x = torch.randn(5, 2 * hidden, device=device).to(dtype)[:, hidden:]
    weight = torch.randn(hidden, device=device).to(dtype)
    found = launch.rmsnorm(Jit(), x, weight, 1e-6)
    want = ref.rmsnorm(x, weight, 1e-6)
    assert found.dtype == dtype and ((found - want).abs() <= BOUND[dtype] * want.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [96, 192])
def test_add_rmsnorm(device: str, dtype: torch.dtype, hidden: int) -> None:
    x, residual = (torch.randn(5, hidden, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(hidden, device=device).to(dtype)
    total, normed = launch.add_rmsnorm(Jit(), x, residual, weight, 1e-5)
    want_total, want = ref.add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(total, want_total)
    assert ((normed - want).abs() <= BOUND[dtype] * want.abs() + 1e-6).all()


def test_no_rows_and_strided_columns(device: str) -> None:
    weight = torch.randn(64, device=device)
    assert launch.rmsnorm(Jit(), torch.empty(0, 64, device=device), weight, 1e-6).shape == (0, 64)
    with pytest.raises(ValueError, match="rows must be contiguous"):
        launch.rmsnorm(Jit(), torch.randn(64, 5, device=device).T, weight, 1e-6)
