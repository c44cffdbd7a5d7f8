"""The steps of one job: read, check, cut, fuse, pack. A step is small, independent of the others, and thread-safe.

Order inside a step is fixed: cut each source, then fuse, then pack. Fusing does not commute with cutting.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from convert.readers.files import as_bytes
from convert.readers.source import Source
from convert.repack.clock import Clock
from convert.shard.plan import Job, Plan, Store, Work, ways
from runtime_min.kernels.layouts import Int4Groups, layout
from specs.errors import SourceError
from specs.expand import tensor_names
from specs.mesh import cut
from specs.storage import ITEM_BYTES, nbytes

BLOCK_BYTES = 32 << 20
DIGEST_BLOCK = 8 << 20
MOVED_AS = {"BF16": torch.int16, "F32": torch.int32, "I64": torch.int64}
FileKey = tuple[Store, int]


@dataclass(slots=True)
class Result:
    """What one step made. chunks: bytes to append to files, in order. digests: sha256 of whole source tensors."""

    chunks: list[tuple[FileKey, Tensor]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    read: int = 0
    zero_scales: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """nbytes: memory the step may hold until its chunks are written. aside: it makes none, so none wait for it."""

    nbytes: int
    run: Callable[[], Result]
    aside: bool = False


def steps(job: Job, plan: Plan, source: Source, clock: Clock) -> Iterator[Step]:
    """Every step of a job, so that appending their chunks in this order writes each file front to back."""
    for kind, works in job.store.items():
        for work in works:
            make = _int4_steps if work.form.stack else _plain_steps
            yield from make(work, kind, plan, source, clock)


def tensors(job: Job) -> set[str]:
    """Names of all source tensors that the steps of a job read."""
    names: set[str] = set()
    for work in (w for works in job.store.values() for w in works):
        stack, family = work.form.stack, work.item.family
        experts = [
            first + index for first in range(0, family.stack, stack or 1) for index in range(work.start, work.stop)
        ]
        stems = [s for e in (experts if stack else [0]) for s in work.item.sources[e]]
        names |= {name for stem in stems for name in tensor_names(family.row.format, stem)}
    return names


def _ranks(plan: Plan, kind: Store, work: Work, part: int, group: int | None = None) -> list[FileKey]:
    """Files to write that hold part `part` of the cut axis (and expert group `group`)."""
    if kind != "rank":
        return [(kind, 0)]
    mesh = plan.mesh
    axis, n = ways(work.item.family, mesh)
    return [
        (kind, r)
        for r in plan.ranks
        if (n == 1 or mesh.index(axis, r) == part) and (group is None or mesh.index("ep", r) == group)
    ]


def _int4_steps(work: Work, kind: Store, plan: Plan, source: Source, clock: Clock) -> Iterator[Step]:
    """One step per expert: all its fused sources, for every rank that holds a part of it."""
    stack = work.form.stack
    groups = work.item.family.stack // stack
    nbytes = 3 * (work.form.nbytes // stack) * ways(work.item.family, plan.mesh)[1]
    for index in range(work.start, work.stop):
        for group in range(groups):
            for j, stem in enumerate(work.item.sources[group * stack + index]):
                source.soon(f"{stem}.weight_packed", 0, work.item.family.stored(j)[0])
            yield Step(nbytes, partial(_int4_step, work, kind, group, group * stack + index, plan, source, clock))


def _int4_step(work: Work, kind: Store, group: int, expert: int, plan: Plan, source: Source, clock: Clock) -> Result:
    family, result, parts = work.item.family, Result(), []
    for j, stem in enumerate(work.item.sources[expert]):
        parts.append(_read_int4(stem, family.stored(j), source, clock, result))
    _, n = ways(family, plan.mesh)
    chosen = layout(work.form.layout, work.form.parameters)
    with clock("repack"):
        for part in range(n):
            if not (keys := _ranks(plan, kind, work, part, group)):
                continue
            mine = parts
            if family.split_axis is not None and n > 1:
                axis = family.split_axis
                mine = [p.cut(axis, *cut(p.shape[axis], n, part)) for p in parts]
            packed = chosen.pack(Int4Groups.fuse(mine))
            result.chunks += [(key, packed) for key in keys]
    return result


def _read_int4(stem: str, shape: tuple[int, ...], source: Source, clock: Clock, result: Result) -> Int4Groups:
    """One expert matrix [N, K] with its values checked: shape label, and scales that are finite and not negative."""
    n, k = shape
    with clock("read"):
        packed = source.rows(f"{stem}.weight_packed", 0, n)
        scale = source.rows(f"{stem}.weight_scale", 0, n)
        label = source.rows(f"{stem}.weight_shape", 0, 2)
    result.read += packed.numel() + scale.numel() + label.numel()
    with clock("hash"):
        result.digests[f"{stem}.weight_packed"] = _sha256(packed)
        result.digests[f"{stem}.weight_scale"] = _sha256(scale)
    with clock("check"):
        found = label.view(torch.int32 if label.numel() == 8 else torch.int64).tolist()
        if found != [n, k]:
            raise SourceError(
                f"{stem}.weight_shape: holds {found}, but weight_packed is {[n, k // 8]}, expected {[n, k]}"
            )
        bits = scale.view(torch.int16)
        low, high = int(bits.min()), int(bits.max())
        if low < 0 or high >= 0x7F80:
            _bad_scale(f"{stem}.weight_scale", scale.view(torch.bfloat16).view(n, k // 32))
        if low == 0:
            result.zero_scales += int((bits == 0).sum())
    return Int4Groups(packed.view(torch.int32).view(n, k // 8), scale.view(torch.bfloat16).view(n, k // 32))


def _bad_scale(name: str, scale: Tensor) -> None:
    bad = ~torch.isfinite(scale) | torch.signbit(scale)
    row, group = (int(i) for i in bad.nonzero()[0])
    raise SourceError(
        f"{name}: {int(bad.sum())} scales are negative or not finite, the first is {scale[row, group].item()} at row "
        f"{row}, group {group}; scales must be finite and not negative. Is the file damaged?"
    )


def _plain_steps(work: Work, kind: Store, plan: Plan, source: Source, clock: Clock) -> Iterator[Step]:
    """Blocks of leading rows of each source; where the leading axis is cut, the ranks' blocks take turns."""
    family = work.item.family
    _, n = ways(family, plan.mesh)
    by_rank = family.split_axis == 0 and n > 1
    for j, name in enumerate(work.item.sources[0]):
        shape = family.shapes[j]
        row_bytes = prod(shape[1:]) * ITEM_BYTES[family.row.dtype]
        block = max(1, BLOCK_BYTES // max(1, row_bytes))
        rows = shape[0] // n if by_rank else shape[0]
        first = family.take is None or family.take[1] == 0
        whole = rows == shape[0] and rows <= block
        if first and not whole:
            yield Step(BLOCK_BYTES, partial(_digest_step, name, family.stored(j)[0], source, clock), aside=True)
        for low in range(0, rows, block):
            for part in range(n) if by_rank else (None,):
                if part is not None and not _ranks(plan, kind, work, part):
                    continue
                start = low + rows * (part or 0)
                stop = start + min(block, rows - low)
                merged = family.stored(j)[0] // shape[0]
                source.soon(name, start * merged, stop * merged)
                run = partial(_plain_step, work, kind, name, j, start, stop, part, first and whole, plan, source, clock)
                yield Step(2 * (stop - start) * row_bytes, run)


def _digest_step(name: str, rows: int, source: Source, clock: Clock) -> Result:
    """The digest of a source tensor that other steps take apart; its bytes come from the page cache."""
    digest = hashlib.sha256()
    dtype, shape = source.header[name]
    step = source.leading(name)
    block = max(1, rows // step * DIGEST_BLOCK // nbytes(shape, dtype)) * step
    for low in range(0, rows, block):
        with clock("read"):
            data = source.rows(name, low, min(rows, low + block))
        with clock("hash"):
            digest.update(as_bytes(data))
    return Result(digests={name: digest.hexdigest()})


def _plain_step(
    work: Work,
    kind: Store,
    name: str,
    j: int,
    low: int,
    high: int,
    only: int | None,
    digest: bool,
    plan: Plan,
    source: Source,
    clock: Clock,
) -> Result:
    """Leading rows low..high of one source, to the files that hold them."""
    family, result = work.item.family, Result()
    shape = family.shapes[j]
    merged = family.stored(j)[0] // shape[0]
    with clock("read"):
        raw = source.rows(name, low * merged, high * merged)
    result.read = raw.numel()
    if digest:
        with clock("hash"):
            result.digests[name] = _sha256(raw)
    with clock("repack"):
        block = raw.view(MOVED_AS[family.row.dtype]).view(high - low, *shape[1:])
        if family.take is not None:
            axis, first, last = family.take
            block = block.narrow(axis, first, last - first)
        _, n = ways(family, plan.mesh)
        for part in range(n) if only is None else (only,):
            if not (keys := _ranks(plan, kind, work, part)):
                continue
            mine = block
            if only is None and n > 1 and family.split_axis is not None:
                mine = block.narrow(family.split_axis, *_narrow(block.shape[family.split_axis], n, part))
            chunk = mine.contiguous()
            result.chunks += [(key, chunk) for key in keys]
    return result


def _narrow(size: int, parts: int, index: int) -> tuple[int, int]:
    low, high = cut(size, parts, index)
    return low, high - low


def _sha256(data: Tensor) -> str:
    return hashlib.sha256(as_bytes(data)).hexdigest()
