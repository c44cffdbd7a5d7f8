"""One command, all ranks: the artifact's world as processes of this machine, or this process under torchrun."""

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.multiprocessing as mp

from runtime_min import ranks
from runtime_min.artifact import Artifact
from runtime_min.kernels.check import require
from runtime_min.kernels.choose import kernels_of, tables_here
from runtime_min.kernels.cubin import Cubins
from runtime_min.kernels.jit import Jit
from runtime_min.kernels.launch import Kernels
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.ops import REF, Ops, triton_ops
from specs import manifest
from specs.errors import InputError
from specs.mesh import Mesh

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class DeviceError(InputError):
    """The device, dtype or ops that were asked for do not go together here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What every rank needs to know. `dtype` and `ops` None mean the device's default. `verify`: sha256 of this rank's
    files. `check`: compare kernels with their definitions first. `sums`: how ranks on GPUs add up, None for NCCL."""

    artifact: Path
    device: str | None = None
    dtype: str | None = None
    ops: str | None = None
    inner_eps: float = 1e-6
    verify: bool = True
    check: bool = True
    sums: str | None = None

    @property
    def how(self) -> dict[str, Any]:
        """All fields but the artifact."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "artifact"}


Task = Callable[[Decoder, Artifact, Any], Any]


def settings(run: Run, rank: int, world: int) -> tuple[Settings, str]:
    """Device, dtype and the name of the ops of one rank; DeviceError for a combination that does not exist here."""
    gpus = torch.cuda.device_count()
    kind = run.device or ("cuda" if gpus >= world else "cpu")
    if kind == "cuda" and gpus < world:
        raise DeviceError(f"--device cuda: {world} ranks want {world} GPUs, {gpus} are there; use --device cpu")
    dtype = run.dtype or ("bfloat16" if kind == "cuda" else "float32")
    ops = run.ops or ("triton" if kind == "cuda" else "ref")
    if dtype == "float64" and ops == "triton":
        raise DeviceError("--dtype float64 exists for the reference ops only; use --ops ref")
    if ops == "triton" and kind == "cpu":
        from runtime_min.kernels.compat import INTERPRET

        if not INTERPRET:
            raise DeviceError("--ops triton needs a GPU, or TRITON_INTERPRET=1 for Triton's slow CPU interpreter")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    return Settings(dtype=DTYPES[dtype], device=device, inner_eps=run.inner_eps), ops


def ops_of(name: str, artifact: Artifact, how: Settings) -> Ops:
    """Reference ops, or Triton ops by the artifact's own compiled kernels (bf16 on a GPU) or Triton's JIT."""
    if name == "ref":
        return REF
    if how.device.type == "cuda" and how.dtype == torch.bfloat16:
        return triton_ops(kernels_of(artifact.path, artifact.manifest["digest"]))
    return triton_ops(Jit())


def facts(artifact: Artifact, how: Settings, name: str, kernels: Kernels | None) -> dict[str, str]:
    """What every rank must have alike. Where the artifact lies may differ from host to host."""
    digest = str(artifact.manifest["digest"])
    tuned = tables_here(artifact.path, digest) if kernels is not None and how.device.type == "cuda" else []
    return {
        "artifact": digest,
        "kernels": kernels.digest if isinstance(kernels, Cubins) else type(kernels).__name__,
        "tuning": " ".join(t.digest for t in tuned) or "none",
        "ops": name,
        "dtype": str(how.dtype),
        "inner epsilon": str(how.inner_eps),
        "torch": torch.__version__,
    }


@contextmanager
def loaded(run: Run, rank: int, world: int, init: str | None) -> Iterator[tuple[Decoder, Artifact]]:
    """One rank's model: checked, joined with the others, agreed, loaded."""
    chosen, name = settings(run, rank, world)
    artifact = Artifact.open(run.artifact, rank, verify=run.verify)
    ranks.check(artifact.mesh, rank, world)
    if chosen.device.type == "cuda":
        torch.cuda.set_device(chosen.device)
    elif world > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // world))
    group = ranks.join(artifact.mesh, rank, world, chosen.device, init, run.sums)
    try:
        ops = ops_of(name, artifact, chosen)
        group.agree(facts(artifact, chosen, name, ops.kernels))
        model = Decoder.load(artifact, ops, group, chosen)
        if rank == 0:
            sys.stderr.write(f"load: {', '.join(map(str, artifact.phases))}\n")
        if run.check and name == "triton" and chosen.device.type == "cuda":
            seconds = require(model)
            if rank == 0:
                sys.stderr.write(f"self-check: every kernel agrees with its definition, {seconds:.1f} s\n")
        yield model, artifact
    finally:
        ranks.leave()


def execute(run: Run, task: Task, argument: Any, rank: int, world: int, init: str | None) -> Any:
    """One rank: check, load, join the others, do the task."""
    with loaded(run, rank, world, init) as (model, artifact):
        return task(model, artifact, argument)


def _child(rank: int, run: Run, task: Task, argument: Any, world: int, init: str, results: Any) -> None:
    try:
        results.put((rank, True, execute(run, task, argument, rank, world, init)))
    except InputError as e:
        results.put((rank, False, e))
    except BaseException:
        traceback.print_exc()
        raise


def world_of(run: Run) -> int:
    """How many processes an artifact wants; everything wrong with it or the devices is found here, once."""
    world = Mesh(**manifest.read(run.artifact)["mesh"]).world
    settings(run, 0, world)
    return world


class Processes:
    """Every rank of an artifact as a process of this machine. None outlives another that failed, nor this object."""

    def __init__(self, run: Run, task: Task, argument: Any, world: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.results = mp.get_context("spawn").SimpleQueue()
        self.got: dict[int, Any] = {}
        arguments = (run, task, argument, world, f"file://{self.folder.name}/store", self.results)
        context: Any = mp.spawn(_child, arguments, nprocs=world, join=False)  # type: ignore[attr-defined, no-untyped-call]
        self.processes = list(context.processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def sentinels(self) -> list[int]:
        """What becomes ready when a process ends."""
        return [p.sentinel for p in self.processes]

    def alive(self) -> bool:
        """Are there processes left? Raises the InputError of a rank, or RanksError for one that died."""
        while not self.results.empty():
            rank, good, value = self.results.get()
            if not good:
                self.kill()
                raise value
            self.got[rank] = value
        codes = {rank: p.exitcode for rank, p in enumerate(self.processes)}
        dead = {rank: code for rank, code in codes.items() if code}
        if dead:
            # The others fail because one was killed: name that one.
            rank = min(dead, key=lambda r: (dead[r] > 0, r))
            how = f"was killed by signal {-dead[rank]}" if dead[rank] < 0 else "failed, as told above"
            self.kill()
            raise ranks.RanksError(f"rank {rank} of {len(codes)} {how}; the others were ended, start again")
        return any(code is None for code in codes.values())

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def launch(run: Run, task: Task, argument: Any, under_torchrun: tuple[int, int] | None = None) -> Any:
    """Runs `task(decoder, artifact, argument)` on every rank and returns rank 0's result.

    Raises the InputError of whichever rank met one. A rank that dies takes the others with it.
    """
    if under_torchrun is not None:
        return execute(run, task, argument, *under_torchrun, init=None)
    world = world_of(run)
    if world == 1:
        return execute(run, task, argument, 0, 1, None)
    with Processes(run, task, argument, world) as running:
        while running.alive():
            wait(running.sentinels, timeout=0.1)
        return running.got.get(0)
