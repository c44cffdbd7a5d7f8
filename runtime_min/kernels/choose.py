"""Which config a problem gets on a GPU, and who launches: cubins of the artifact, or Triton's JIT, said in one line."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime_min.kernels import index, tuning
from runtime_min.kernels.cubin import Cubins, arch_here
from runtime_min.kernels.jit import Jit
from runtime_min.kernels.launch import Kernels, Problem
from runtime_min.kernels.tuning import Table
from specs.schema import archs

Choose = Callable[[Problem], Any]


def chooser(arch: str, tables: Sequence[Table] = ()) -> Choose:
    """Configs for one architecture: what the first table says that knows the problem, else the default that fits the
    shared memory of a block."""
    shared = archs()[arch]["shared_bytes"]
    tuned: dict[Problem, Any] = {}
    for table in reversed(tables):
        tuned |= table.configs()

    def choose(problem: Problem) -> Any:
        return tuned[problem] if problem in tuned else problem.default(shared)

    return choose


def choosers(arch: str, artifact: Path, weights: str) -> list[Choose]:
    """Every way in which a machine of this architecture may choose: by the defaults, or by a device's tables."""
    found = tuning.tables(arch, artifact, weights)
    devices = dict.fromkeys(t.setting.device for t in found)
    return [chooser(arch), *(chooser(arch, tables_of(d, found)) for d in devices)]


def chooser_here() -> Choose:
    """Configs for the current GPU by the package's tables."""
    return chooser(arch_here(), tables_here())


def tables_here(artifact: Path | None = None, weights: str = "") -> list[Table]:
    """The tables that the current GPU's configs come from."""
    return tables_of(torch.cuda.get_device_name(), tuning.tables(arch_here(), artifact, weights))


def tables_of(device: str, tables: Sequence[Table]) -> list[Table]:
    return [t for t in tables if t.setting.device == device]


def kernels_of(artifact: Path, weights: str) -> Kernels:
    """Compiled kernels if kernels/<this GPU> is there, and then nothing else: KernelError if they do not fit."""
    arch = arch_here()
    if arch not in archs():
        raise index.KernelError(
            f"{arch}: this GPU is of an architecture that is not known; known are {', '.join(archs())}"
        )
    tables = tables_here(artifact, weights)
    said = remarks(torch.cuda.get_device_name(), tables)
    if said:
        sys.stderr.write(f"tuning: {'; '.join(said)}; `kiln-run tune {artifact}` times what is missing\n")
    if (index.folder(artifact, arch) / index.NAME).exists():
        return Cubins(artifact, arch, weights, chooser(arch, tables))
    what = f"none compiled for {arch}, Triton compiles at first use"
    sys.stderr.write(f"kernels: {what}; {index.rebuild(artifact, arch)}\n")
    return Jit(chooser(arch, tables))


def remarks(device: str, tables: Sequence[Table]) -> list[str]:
    """What keeps a device from its tuned configs, if anything does."""
    if not tables:
        return [f"no table for {device}, default configs"]
    said = []
    stale = {op for t in tables for op in t.stale} - {e.problem.op for t in tables for e in t.entries}
    if stale:
        said.append(f"{', '.join(sorted(stale))} tuned with other device code, default configs")
    other = {t.setting.triton for t in tables} - {_triton()}
    if other and _triton():
        said.append(f"timed with Triton {', '.join(sorted(other))}, installed is {_triton()}, the table is used")
    return said


def _triton() -> str:
    """Version of the installed Triton, empty without one."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
