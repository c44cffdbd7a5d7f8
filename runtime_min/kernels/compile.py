"""Ahead of time: a cubin for every kernel that an artifact's model can launch, on any machine, without a GPU."""

import hashlib
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from runtime_min.artifact import Artifact, Stored
from runtime_min.kernels import index, tuning
from runtime_min.kernels.choose import choosers
from runtime_min.kernels.index import Compiled, KernelError
from runtime_min.kernels.jit import function
from runtime_min.kernels.launch import Problem
from runtime_min.kernels.record import Recorder, Step, Variant, steps
from runtime_min.kv import LatentCache, batch, room
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_artifact
from runtime_min.ops import Ops, triton_ops
from runtime_min.pages import Sequence
from runtime_min.ranks import Ranks
from specs.dims import TextDims, VisionDims
from specs.mesh import Mesh
from specs.schema import archs


class Alone(Ranks):
    """A rank whose peers are not there: shapes are right, values are nobody's."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.mesh.tp, -1)

    def agreed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def brought(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        return x if self.groups == 1 else x.new_zeros(self.groups * rows, x.shape[1])

    def sum_own(self, x: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
        return self.own(x, rows, tokens)

    def shared(self, value: Any) -> Any:
        return value

    def every(self, value: Any) -> list[Any]:
        return [value]


def recorded(
    dims: TextDims,
    mesh: Mesh,
    weights: dict[str, Stored],
    dtype: torch.dtype,
    choose: Callable[[Problem], Any],
    vision: VisionDims | None = None,
) -> Recorder:
    """Every kernel and problem of a rank's model up to its context, and of its vision tower; weights on the meta
    device."""
    recorder = Recorder(choose)
    how = Settings(dtype=dtype, device=torch.device("meta"), positions=min(dims.context, 1 << 18))
    model = Decoder(dims, weights, triton_ops(recorder), Alone(0, mesh), how)
    for step in steps(dims.context):
        take(model, step)
    if vision is not None:
        see(vision, model.ops, dtype)
    return recorder


def see(dims: VisionDims, ops: Ops, dtype: torch.dtype) -> None:
    """The kernels of the vision tower, which do not depend on the pictures' sizes."""
    head = dims.vit_hidden // dims.vit_heads
    qkv = torch.empty(4, 3, dims.vit_heads, head, dtype=dtype, device="meta")
    angles = torch.empty(4, head // 2, device="meta")
    ops.vit_attn(qkv, angles, angles, (4,))


def take(model: Decoder, step: Step) -> None:
    """One step of a batch of these sizes, whose past was never computed."""
    cache = model.cache(room(cached for _, cached in step.sequences))
    model.forward(batch(cache, work(cache, step, lambda count: [0] * count)), cache)


def work(cache: LatentCache, step: Step, ids: Callable[[int], list[int]]) -> list[tuple[Sequence, list[int]]]:
    """Sequences whose past has its pages, and the ids of the tokens that follow."""
    out = []
    for queries, cached in step.sequences:
        sequence = Sequence()
        cache.grow(sequence, cached - queries)
        sequence.length = cached - queries
        out.append((sequence, ids(queries)))
    return out


def compile_artifact(path: Path, arch: str, workers: int, progress: Callable[[int, int], None]) -> tuple[int, bool]:
    """Writes kernels/<arch> of an artifact, and the package's tables for it to tuning/.

    Returns the number of kernels, and whether they were there already. The same artifact, sources and Triton give the
    same bytes. Raises KernelError for a kernel that wants more shared memory than a block of the architecture has.
    """
    import triton

    from runtime_min.kernels.compat import INTERPRET

    if INTERPRET:
        raise KernelError("compile: TRITON_INTERPRET is set, and an interpreter compiles nothing; unset it")
    artifact = Artifact.open(path, 0, verify=False)
    weights = artifact.manifest["digest"]
    shapes = of_artifact(artifact, torch.bfloat16)
    tuning.put(path, arch, weights)
    seen = artifact.config.vision if artifact.has_vision else None
    found: dict[Variant, None] = {}
    for choose in choosers(arch, path, weights):
        found |= recorded(artifact.config.text, artifact.mesh, shapes, torch.bfloat16, choose, seen).variants
    wanted = list(found)
    target = index.folder(path, arch)
    if _there(path, arch, weights, wanted):
        return len(wanted), True
    draft = target.with_name(f"{arch}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    made = []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for kernel, cubin in pool.map(partial(compiled, arch=arch), wanted, chunksize=1):
            (draft / kernel.file).write_bytes(cubin)
            made.append(kernel)
            progress(len(made), len(wanted))
    _check_shared(made, arch)
    (draft / index.NAME).write_bytes(index.sealed(arch, weights, triton.__version__, made))
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    return len(wanted), False


def _there(path: Path, arch: str, weights: str, wanted: Iterable[Variant]) -> bool:
    """Are exactly these kernels compiled and unharmed?"""
    try:
        found = index.read(path, arch, weights)
        for kernel in found.values():
            index.image(path, arch, kernel)
    except Exception:
        return False
    return set(found) == set(wanted)


def _check_shared(made: list[Compiled], arch: str) -> None:
    limit = archs()[arch]["shared_bytes"]
    over = [k for k in made if k.shared_bytes > limit]
    if over:
        raise KernelError(
            f"{arch}: {k.variant.kernel} {dict(k.variant.constants)} wants {k.shared_bytes:,} bytes of shared "
            f"memory, a block has {limit:,}; give it a smaller default there"
            for k in over
        )


def compiled(variant: Variant, arch: str) -> tuple[Compiled, bytes]:
    """One kernel for one architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # Neither where the sources lie nor which machine this is may show in the bytes.
    triton.knobs.compilation.disable_line_info = True
    fn = function(variant.kernel)
    constants = dict(variant.constants)
    types = iter(variant.types)
    signature = {name: "constexpr" if name in constants else next(types) for name in fn.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if signature[name].startswith("*")
    }
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    made: Any = triton.compile(source, target=GPUTarget("cuda", archs()[arch]["target"], 32), options=options)
    cubin: bytes = made.asm["cubin"]
    meta = made.metadata
    scratch = (int(meta.global_scratch_size), int(getattr(meta, "profile_scratch_size", 0)))
    key = hashlib.sha256(repr(variant).encode()).hexdigest()[:16]
    kernel = Compiled(
        variant=variant, file=f"{variant.kernel}-{key}.cubin", symbol=meta.name, shared_bytes=int(meta.shared),
        scratch=scratch, sha256=hashlib.sha256(cubin).hexdigest(),
    )  # fmt: skip
    return kernel, cubin
