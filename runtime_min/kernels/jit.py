"""Launches through Triton's JIT (or its CPU interpreter, if TRITON_INTERPRET=1 was set before the first import)."""

from collections.abc import Callable
from functools import cache, cached_property
from importlib import import_module
from typing import Any

from runtime_min.kernels.cubin import overlaps_here
from runtime_min.kernels.launch import Launch, Problem
from runtime_min.kernels.record import Variant, variant


@cache
def function(kernel: str) -> Any:
    """The Triton function of "op.function"."""
    op, name = kernel.split(".")
    return getattr(import_module(f"runtime_min.kernels.{op}.kernel"), name)


class Jit:
    """Kernels with their default configs, compiled at first use. overlap: on GPUs that can, a launch may begin before
    the one before it ends; kernels then wait on the card."""

    def __init__(self, choose: Callable[[Problem], Any] | None = None, overlap: bool = True) -> None:
        self.choose, self.overlap = choose, overlap
        self.seen: set[Variant] = set()

    @property
    def compiled(self) -> int:
        return len(self.seen)

    def pick(self, problem: Problem) -> Any:
        return problem.default() if self.choose is None else self.choose(problem)

    @cached_property
    def options(self) -> dict[str, bool]:
        """What every launch is told; asked at the first one, when the process has its GPU."""
        return {"launch_pdl": True} if self.overlap and overlaps_here() else {}

    def run(self, launch: Launch) -> None:
        self.seen.add(variant(launch))
        import_module("runtime_min.kernels.scratch_device").allow()
        function(launch.kernel)[launch.grid](
            *launch.args, **launch.constants, num_warps=launch.warps, num_stages=launch.stages,
            maxnreg=launch.registers or None,
            **(self.options if launch.overlap else {}),
        )  # fmt: skip
