"""The dtype that reference ops compute in."""

import torch
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
