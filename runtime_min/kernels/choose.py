"""Who launches an artifact's kernels on a GPU: cubins that came with it, or Triton's JIT, said in one line."""

import sys
from pathlib import Path
from typing import Any

from runtime_min.kernels import index
from runtime_min.kernels.cubin import Cubins, arch_here
from runtime_min.kernels.jit import Jit
from runtime_min.kernels.launch import Kernels, Problem


def default(problem: Problem) -> Any:
    return problem.default()


def kernels_of(artifact: Path, weights: str) -> Kernels:
    """Compiled kernels if kernels/<this GPU> is there, and then nothing else: KernelError if they do not fit."""
    arch = arch_here()
    if (index.folder(artifact, arch) / index.NAME).exists():
        return Cubins(artifact, arch, weights, default)
    what = f"none compiled for {arch}, Triton compiles at first use"
    sys.stderr.write(f"kernels: {what}; {index.rebuild(artifact, arch)}\n")
    return Jit()
