"""How an op says what to launch, without naming who launches it.

An op's launch.py turns tensors into `Launch`es and needs no triton. A `Kernels` carries them out: by Triton's JIT
(`jit.py`), and later from cubins that were compiled ahead of time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

# log2(e): kernels raise 2, which the hardware does, where definitions raise e.
LOG2E = 1.4426950408889634
# Shared memory of a block on the widest cards, in bytes.
WIDEST = 232448
Scalar = int | float | bool
Constant = int | float | bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of one kernel. `kernel`: "op.function". `args`: tensors, integers and floats in the order of the
    kernel's run-time parameters. `constants`: its constexpr parameters by name. `registers`: the most of a thread, 0
    leaves it to the compiler. `overlap`: may it begin before the launch
    before it ends, where the GPU can?"""

    kernel: str
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    constants: Mapping[str, Constant]
    warps: int = 4
    stages: int = 2
    registers: int = 0
    overlap: bool = True


class Problem(Protocol):
    """Sizes that a choice of kernel depends on; a frozen dataclass of plain numbers."""

    op: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def candidates(self) -> list[Any]:
        """Configs worth timing."""

    def default(self, shared: int = WIDEST) -> Any:
        """The config to use where no table says better, on cards whose blocks have `shared` bytes of shared memory."""


class Kernels(Protocol):
    """Picks a config for a problem and runs launches in order on the current stream."""

    def pick(self, problem: Problem) -> Any: ...

    def run(self, launch: Launch) -> None: ...

    @property
    def compiled(self) -> int:
        """How many kernels had to be compiled in this process so far."""
        ...


def power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
