"""silu(gate) * up against its definition."""

import pytest
import torch

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.silu_mul import launch, ref

# fp32: two implementations of exp. bf16: the result may round to the other neighbour.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize(("tokens", "width"), [(1, 32), (5, 150), (3, 2048), (0, 64)])
def test_silu_mul(device: str, dtype: torch.dtype, tokens: int, width: int) -> None:
    gate_up = (4 * torch.randn(tokens, 2 * width + 8, device=device)).to(dtype)[:, 8:]
    found = launch.silu_mul(Jit(), gate_up)
    want = ref.silu_mul(gate_up)
    assert found.dtype == dtype and found.shape == want.shape
    assert ((found - want).abs() <= BOUND[dtype] * want.abs() + 1e-6).all()


def test_large_gates_do_not_overflow(device: str) -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 5.0]], device=device)
    assert torch.equal(launch.silu_mul(Jit(), gate_up).cpu(), torch.tensor([[0.0, 1000.0]]))
