"""silu(gate) * up, by definition."""

from torch import Tensor
from torch.nn.functional import silu

from runtime_min.kernels.wide import wide


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 F], gate before up -> silu(gate) * up [T, F], same dtype."""
    gate, up = gate_up.to(wide(gate_up)).chunk(2, -1)
    return (silu(gate) * up).to(gate_up.dtype)
