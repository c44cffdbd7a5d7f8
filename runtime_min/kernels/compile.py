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

from runtime_min.artifact import Artifact, Stored, rank_of
from runtime_min.drafts import DFlash, Draft, Eagle3
from runtime_min.drafts.open import made
from runtime_min.kernels import index, tuning
from runtime_min.kernels.choose import choosers
from runtime_min.kernels.index import Compiled, KernelError
from runtime_min.kernels.jit import function
from runtime_min.kernels.launch import Problem
from runtime_min.kernels.record import Recorder, Step, Variant, steps, trees
from runtime_min.kernels.vit_attn.launch import LENGTHS
from runtime_min.kv import LatentCache, batch, room
from runtime_min.models.decoder import Around, Attention, Decoder, Settings
from runtime_min.models.shapes import of_artifact, of_entries
from runtime_min.ops import Ops, triton_ops
from runtime_min.pages import PAGE_TOKENS, Sequence
from runtime_min.ranks import Ranks
from specs import manifest
from specs.dims import TextDims, VisionDims
from specs.draft import DraftConfig, read_draft_config
from specs.mesh import Mesh
from specs.schema import archs

# Positions of a model whose kernels are recorded.
LONGEST = 1 << 18
# Kernels in Gluon name one generation's instructions.
GLUON_TARGET = 90


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
    drafts: Iterable[tuple[DraftConfig, dict[str, Stored]]] = (),
) -> Recorder:
    """Every kernel and problem of a rank's model up to its context, of its vision tower and its drafts; weights on the
    meta device."""
    recorder = Recorder(choose)
    how = Settings(dtype=dtype, device=torch.device("meta"), positions=min(dims.context, LONGEST))
    model = Decoder(dims, weights, triton_ops(recorder), Alone(0, mesh), how)
    for step in steps(dims.context):
        take(model, step)
    grow(model, model.layers[0][1].heads, how)
    if vision is not None:
        see(vision, model.ops, dtype)
    for config, mine in drafts:
        guess(made(config, mine, model), steps(min(dims.context, LONGEST)))
    return recorder


def grow(model: Around, heads: int, how: Settings) -> None:
    """Decode attention of trees, whose sizes no other op depends on."""
    d = model.dims
    for step in trees():
        counts = [n for n, _ in step.sequences]
        tokens, sequences, pages = sum(counts), len(counts), -(-step.sequences[0][1] // PAGE_TOKENS)
        zeros = partial(torch.zeros, device=how.device)
        cu_q = torch.arange(0, tokens + 1, counts[0], dtype=torch.int32, device=how.device)
        lengths = torch.full((sequences,), step.sequences[0][1], dtype=torch.int32, device=how.device)
        model.ops.mla_decode(
            zeros(tokens, heads, d.kv_lora, dtype=how.dtype), zeros(tokens, heads, d.qk_rope, dtype=how.dtype),
            zeros(PAGE_TOKENS, d.kv_a, dtype=how.dtype), zeros(sequences, pages, dtype=torch.int32), cu_q, lengths,
            PAGE_TOKENS, model.scale, counts[0], (lengths - counts[0], zeros(tokens, dtype=torch.int64)),
        )  # fmt: skip


def guess(draft: Draft, which: Iterable[Step]) -> None:
    """The kernels of a draft over steps as its target takes them."""
    target = draft.target
    for step in which:
        cache = target.cache(room(cached + draft.dims.block for _, cached in step.sequences))
        rows, past = draft.cache(cache), work(cache, step, lambda count: [0] * count)
        whole = batch(cache, past)
        tokens, like = len(whole.ids), target.embed
        embeds, states = like.new_zeros(tokens, draft.dims.hidden), like.new_zeros(tokens, draft.dims.states)
        if isinstance(draft, DFlash):
            draft.context(states, whole, rows)
            block = batch(cache, [(s, [0] * draft.block) for s, _ in past])
            draft.block_logits(like.new_zeros(len(block.ids), draft.dims.hidden), block, rows)
        else:
            draft.first(embeds, states, whole, rows)
            draft.logits(draft.next(embeds, embeds, whole, rows)[1][whole.last])
    if draft.dims.kind == "eagle3_mla":
        assert isinstance(draft, Eagle3) and isinstance(draft.attention, Attention)
        grow(draft, draft.attention.heads, target.settings)


def see(dims: VisionDims, ops: Ops, dtype: torch.dtype) -> None:
    """The kernels of the vision tower, by the length of the longest picture."""
    head = dims.vit_hidden // dims.vit_heads
    for length in LENGTHS:
        qkv = torch.empty(length, 3, dims.vit_heads, head, dtype=dtype, device="meta")
        angles = torch.empty(length, head // 2, device="meta")
        ops.vit_attn(qkv, angles, angles, (length,))


def take(model: Decoder, step: Step) -> None:
    """One step of a batch of these sizes, whose past was never computed."""
    cache = model.cache(room(cached for _, cached in step.sequences))
    model.forward(batch(cache, work(cache, step, lambda count: [0] * count), parents=step.parents), cache)


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
    drafts = [of_draft(artifact, folder.parent) for folder in sorted(path.glob(f"draft/*/{manifest.NAME}"))]
    for choose in choosers(arch, path, weights):
        found |= recorded(artifact.config.text, artifact.mesh, shapes, torch.bfloat16, choose, seen, drafts).variants
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


def of_draft(artifact: Artifact, path: Path) -> tuple[DraftConfig, dict[str, Stored]]:
    """A draft of the artifact by its shapes."""
    _, entries, _ = rank_of(path, artifact.rank, False)
    config = read_draft_config(manifest.read_json(path / "config.json"), artifact.config.text.layers)
    return config, of_entries(entries, torch.bfloat16)


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


def translated(variant: Variant, arch: str) -> Any:
    """Triton's own form of one kernel for one architecture: `asm` by stage, `metadata`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    # Neither where the sources lie nor which machine this is may show in the bytes.
    triton.knobs.compilation.disable_line_info = True
    fn = function(variant.kernel)
    constants = dict(variant.constants)
    types = iter(variant.types)
    signature = {name: "constexpr" if name in constants else next(types) for name in fn.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names) if signature[name].startswith("*")
    }
    target = archs()[arch]["target"]
    if fn.is_gluon() and target != GLUON_TARGET:
        raise KernelError(f"{variant.kernel}: is written for sm{GLUON_TARGET}, not for {arch}")
    form = GluonASTSource if fn.is_gluon() else ASTSource
    source = form(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    options = {
        "num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True,
        "maxnreg": variant.registers or None,
    }  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def compiled(variant: Variant, arch: str) -> tuple[Compiled, bytes]:
    """One kernel for one architecture."""
    made = translated(variant, arch)
    cubin: bytes = made.asm["cubin"]
    meta = made.metadata
    scratch = (int(meta.global_scratch_size), int(getattr(meta, "profile_scratch_size", 0)))
    key = hashlib.sha256(repr(variant).encode()).hexdigest()[:16]
    kernel = Compiled(
        variant=variant, file=f"{variant.kernel}-{key}.cubin", symbol=meta.name, shared_bytes=int(meta.shared),
        scratch=scratch, threads=32 * int(meta.num_warps), sha256=hashlib.sha256(cubin).hexdigest(),
    )  # fmt: skip
    return kernel, cubin
