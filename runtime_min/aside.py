"""Work that runs on a second stream of a GPU, beside what follows it, until its result is needed.

In a captured step this becomes a branch of the graph. Few tokens leave a GPU idle between and around small kernels;
many fill it alone, and would only need room twice.
"""

from functools import cache
from types import TracebackType

import torch
from torch import Tensor

MOST_TOKENS = 256


@cache
def second(device: torch.device) -> torch.cuda.Stream:
    """The other stream of a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def away(device: torch.device) -> bool:
    """Is what is launched now aside?"""
    return device.type == "cuda" and torch.cuda.current_stream(device) == second(device)


class Aside:
    """`with` this, work on x [T, N] goes aside, if it is of few tokens and on a GPU; join() comes before its result is
    used, and x and the result are kept until then.

    What one stream's kernels free only that stream's get again, and the second begins each time after all that the
    first was given before: so nothing is reused too early.
    """

    def __init__(self, x: Tensor) -> None:
        self.stream = second(x.device) if x.is_cuda and len(x) <= MOST_TOKENS else None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.main = torch.cuda.current_stream()
            self.stream.wait_stream(self.main)
            torch.cuda.set_stream(self.stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.stream is not None:
            torch.cuda.set_stream(self.main)

    def join(self) -> None:
        """What follows on the first stream waits for what went aside."""
        if self.stream is not None:
            self.main.wait_stream(self.stream)
