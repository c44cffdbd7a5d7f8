"""Which config a problem gets on a GPU, and who launches: cubins of the artifact, or Triton's JIT, said in one line."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime_min.kernels import index
from runtime_min.kernels.cubin import Cubins, arch_here
from runtime_min.kernels.jit import Jit
from runtime_min.kernels.launch import Kernels, Problem
from specs.schema import archs


def chooser(arch: str) -> Callable[[Problem], Any]:
    """Configs for one architecture: the defaults that fit the shared memory of its blocks."""
    shared = archs()[arch]["shared_bytes"]

    def choose(problem: Problem) -> Any:
        return problem.default(shared)

    return choose


def kernels_of(artifact: Path, weights: str) -> Kernels:
    """Compiled kernels if kernels/<this GPU> is there, and then nothing else: KernelError if they do not fit."""
    arch = arch_here()
    if arch not in archs():
        raise index.KernelError(
            f"{arch}: this GPU is of an architecture that is not known; known are {', '.join(archs())}"
        )
    if (index.folder(artifact, arch) / index.NAME).exists():
        return Cubins(artifact, arch, weights, chooser(arch))
    what = f"none compiled for {arch}, Triton compiles at first use"
    sys.stderr.write(f"kernels: {what}; {index.rebuild(artifact, arch)}\n")
    return Jit(chooser(arch))
