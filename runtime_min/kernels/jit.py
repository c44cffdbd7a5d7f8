"""Launches through Triton's JIT (or its CPU interpreter, if TRITON_INTERPRET=1 was set before the first import)."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from runtime_min.kernels.launch import Launch, Problem
from runtime_min.kernels.record import Variant, variant


@cache
def function(kernel: str) -> Any:
    """The Triton function of "op.function"."""
    op, name = kernel.split(".")
    return getattr(import_module(f"runtime_min.kernels.{op}.kernel"), name)


class Jit:
    """Kernels with their default configs, compiled at first use."""

    def __init__(self, choose: Callable[[Problem], Any] | None = None) -> None:
        self.choose = choose
        self.seen: set[Variant] = set()

    @property
    def compiled(self) -> int:
        return len(self.seen)

    def pick(self, problem: Problem) -> Any:
        return problem.default() if self.choose is None else self.choose(problem)

    def run(self, launch: Launch) -> None:
        self.seen.add(variant(launch))
        import_module("runtime_min.kernels.scratch_device").allow()
        function(launch.kernel)[launch.grid](
            *launch.args, **launch.constants, num_warps=launch.warps, num_stages=launch.stages,
            maxnreg=launch.registers or None,
        )  # fmt: skip
