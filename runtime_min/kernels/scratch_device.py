"""Memory that kernels ask for beside their arguments: descriptors of what the copy engine brings."""

import torch
import triton


def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """torch's memory begins on 512 bytes, more than any kernel asks for."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def allow() -> None:
    """Lets kernels that Triton launches from this thread have scratch memory; it remembers by thread."""
    triton.set_allocator(scratch)
