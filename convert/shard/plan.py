"""plan(spec, config, header, mesh) -> Plan: which file holds which tensor at which byte. Pure: no bytes, no torch.

The unit of work is a Job: one part number, written for all ranks at once from the sources of (usually) one layer.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

from specs.dims import ModelConfig
from specs.draft import DraftConfig
from specs.errors import CutError
from specs.expand import Expanded, Family, Item, check_header, expand
from specs.limits import check_sizes
from specs.mesh import MAX_WORLD, Axis, Mesh, divisors, spell
from specs.schema import Spec
from specs.storage import GROUP, PAGE, int4_slot, largest_tile, nbytes

FORMAT_VERSION = "1.0"
PART_BYTES = 5_000_000_000
Store = Literal["common", "rank", "vision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How one rank stores one item: shape and dtype in the file, and the layout that explains them.

    shapes: per fused source, the local logical shape; a stacked item adds its local stack in front of `shape`.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    parameters: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    stack: int

    @property
    def nbytes(self) -> int:
        return nbytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One item, or indices start..stop of its stacked axis, in one job."""

    item: Item
    form: Form
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.form.shape[1:]) if self.form.stack else self.form.shape

    @property
    def nbytes(self) -> int:
        return nbytes(self.shape, self.form.dtype)


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """One file of the artifact: its header bytes and its tensors front to back."""

    path: str
    rank: int | None
    work: tuple[Work, ...]
    metadata: dict[str, str]

    @cached_property
    def header(self) -> bytes:
        """The safetensors header, padded so that the first tensor starts on a 4096-byte page."""
        entries: dict[str, Any] = {"__metadata__": self.metadata}
        at = 0
        for w in self.work:
            entries[w.item.name] = {"dtype": w.form.dtype, "shape": list(w.shape), "data_offsets": [at, at + w.nbytes]}
            at += w.nbytes
        raw = json.dumps(entries, separators=(",", ":")).encode()
        raw += b" " * (-(len(raw) + 8) % PAGE)
        return len(raw).to_bytes(8, "little") + raw

    @property
    def data_bytes(self) -> int:
        return sum(w.nbytes for w in self.work)

    @property
    def size(self) -> int:
        return len(self.header) + self.data_bytes


@dataclass(frozen=True, kw_only=True)
class Job:
    """One part number: its files, and the items to write into them, in file order."""

    number: int
    label: str
    store: dict[Store, tuple[Work, ...]]
    files: dict[tuple[Store, int], FilePlan]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """ranks: those whose files are written, usually all of the mesh. bound: of a draft, what the manifest says of its
    target."""

    spec: Spec
    config: ModelConfig | DraftConfig
    mesh: Mesh
    expanded: Expanded = field(repr=False)
    header: Mapping[str, tuple[str, tuple[int, ...]]] = field(repr=False)
    jobs: tuple[Job, ...] = field(repr=False)
    part_bytes: int
    ranks: tuple[int, ...]
    bound: dict[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether every rank is written."""
        return len(self.ranks) == self.mesh.world

    @property
    def files(self) -> Iterator[FilePlan]:
        for job in self.jobs:
            yield from job.files.values()

    @cached_property
    def digest(self) -> str:
        """Same source header, spec, mesh and format: same digest."""
        facts: list[Any] = [FORMAT_VERSION, self.spec.digest, str(self.mesh), self.part_bytes]
        facts += [sorted(self.header.items()), *([] if self.whole else [self.ranks])]
        facts += [self.bound] if self.bound else []
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def source_bytes(self) -> int:
        return sum(nbytes(shape, dtype) for dtype, shape in self.header.values())

    def data_bytes(self, store: Store, rank: int = 0) -> int:
        return sum(job.files[store, rank].data_bytes for job in self.jobs if (store, rank) in job.files)

    @property
    def disk_bytes(self) -> int:
        return sum(f.size for f in self.files)


def plan(
    spec: Spec,
    config: ModelConfig | DraftConfig,
    header: Mapping[str, tuple[str, tuple[int, ...]]],
    mesh: Mesh,
    part_bytes: int = PART_BYTES,
    text_only: bool = False,
    ranks: tuple[int, ...] = (),
) -> Plan:
    """The whole conversion, decided; with `text_only` as if the checkpoint had no vision part.

    ranks: those to write, none means all. Raises CutError or HeaderError with every problem of that kind.
    """
    if wrong := sorted(r for r in ranks if not 0 <= r < mesh.world):
        raise CutError(f"ranks {', '.join(map(str, wrong))}: {mesh} has ranks 0..{mesh.world - 1}")
    written = tuple(sorted(set(ranks))) or tuple(range(mesh.world))
    if isinstance(config, ModelConfig):
        check_sizes(config, len(header))
    if text_only:
        assert isinstance(config, ModelConfig)
        header, config = without_vision(spec, config, header), replace(config, vision=None)
    expanded = expand(spec, config, header)
    check_header(expanded, header)
    check_cuts(expanded, mesh)
    forms = {id(item.family): form(item.family, mesh) for item in expanded.items}
    jobs: list[Job] = []
    for label, items in _units(expanded):
        stores: dict[Store, list[Work]] = defaultdict(list)
        for item in items:
            f = forms[id(item.family)]
            stores[store(item.family, mesh)].append(Work(item=item, form=f, start=0, stop=f.stack))
        parts: dict[Store, list[tuple[Work, ...]]] = {s: _parts(w, part_bytes) for s, w in stores.items()}
        for i in range(max(map(len, parts.values()))):
            chosen = {s: p[i] for s, p in parts.items() if i < len(p)}
            jobs.append(_job(len(jobs), i, label, chosen, mesh, written))
    return Plan(
        spec=spec, config=config, mesh=mesh, expanded=expanded, header=header, jobs=tuple(jobs), part_bytes=part_bytes,
        ranks=written,
    )  # fmt: skip


def without_vision(
    spec: Spec, config: ModelConfig, header: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The header without the tensors of the spec's vision part."""
    parts = expand(spec, config, header).parts
    return {name: facts for name, facts in header.items() if parts.get(name) != "vision"}


def store(family: Family, mesh: Mesh) -> Store:
    """Where a family's tensors go: what every rank holds whole is stored once."""
    if family.part == "vision":
        return "vision"
    if not family.row.split:
        return "common"
    whole = prod(mesh.size(m) for m in family.row.split) == 1
    return "common" if whole and mesh.world > 1 else "rank"


def ways(family: Family, mesh: Mesh) -> tuple[Axis, int]:
    """The mesh axis that cuts inside this family's tensors, and into how many."""
    axis: Axis = next((m for m in family.row.split if m != "ep"), "tp")
    return axis, mesh.size(axis) if family.split_axis is not None else 1


def local_shape(family: Family, source: int, mesh: Mesh) -> tuple[int, ...]:
    """One rank's logical share of one source, after `take` and cut, without the stacked axis."""
    shape = list(family.taken(source))
    if family.split_axis is not None:
        shape[family.split_axis] //= ways(family, mesh)[1]
    return tuple(shape)


def form(family: Family, mesh: Mesh) -> Form:
    """How each rank of this mesh stores an item of this family."""
    shapes = tuple(local_shape(family, j, mesh) for j in range(len(family.shapes)))
    fused = (sum(s[0] for s in shapes), *shapes[0][1:])
    if family.row.layout == "plain":
        return Form(dtype=family.row.dtype, shape=fused, layout="plain.v1", parameters={}, shapes=shapes, stack=0)
    n, k = fused
    stack = family.stack // (mesh.ep if "ep" in family.row.split else 1)
    return Form(
        dtype="I32",
        shape=(stack, sum(int4_slot(n, k))),
        layout="int4_tile.v1",
        shapes=shapes,
        stack=stack,
        parameters={"tile_n": largest_tile(n), "tile_k": largest_tile(k)},
    )


def check_cuts(expanded: Expanded, mesh: Mesh) -> None:
    """CutError naming every family this mesh does not divide, with the legal values."""
    families = {id(i.family): i.family for i in expanded.items}
    problems = [p for f in families.values() for p in _uneven(f, mesh)]
    if problems:
        legal = legal_values(expanded, mesh.world)
        hint = f"legal for this model: tp {spell(legal['tp'])}; ep with world {mesh.world}: {spell(legal['ep'])}"
        raise CutError([*problems, hint])


def _uneven(family: Family, mesh: Mesh) -> Iterator[str]:
    row = family.row
    if "ep" in row.split and family.stack % mesh.ep:
        yield f"{row.to}: {family.stack} {row.split['ep']} over ep={mesh.ep} leaves {family.stack % mesh.ep} over"
    if family.split_axis is None:
        return
    axis, parts = ways(family, mesh)
    granule = GROUP if row.layout == "int4_tile" else 1
    for shape in dict.fromkeys(family.shapes):
        size = shape[family.split_axis]
        if size % (parts * granule):
            name = row.axes[family.split_axis]
            whole = "a whole number" if granule == 1 else f"a positive multiple of {granule}"
            yield f"{row.to}: axis {name}={size} over {axis}={parts} gives {size / parts:g} a rank, expected {whole}"


def legal_values(expanded: Expanded, world: int) -> dict[str, list[int]]:
    """tp of any world up to 64, and ep of this world, that divide this model."""
    families = {id(i.family): i.family for i in expanded.items}.values()
    dense = [f for f in families if "tp" in f.row.split]
    stacked = [f for f in families if "ep" in f.row.split]
    tp = [t for t in range(1, MAX_WORLD + 1) if not any(p for f in dense for p in _uneven(f, Mesh(world=t, tp=t)))]
    ep = [e for e in divisors(world) if not any(p for f in stacked for p in _uneven(f, Mesh(world=world, ep=e)))]
    return {"tp": tp, "ep": ep}


def _units(expanded: Expanded) -> Iterator[tuple[str, list[Item]]]:
    """Items that are written together: every layer of the text part and its tensors without a layer, the vision part, a
    draft."""
    layers: dict[int, list[Item]] = defaultdict(list)
    rest: dict[str, list[Item]] = defaultdict(list)
    for item in expanded.items:
        if item.family.part == "text" and item.unit is not None:
            layers[item.unit].append(item)
        else:
            rest["embedding and head" if item.family.part == "text" else item.family.part].append(item)
    for number in sorted(layers):
        yield f"layer {number}", layers[number]
    yield from rest.items()


def _parts(work: list[Work], limit: int) -> list[tuple[Work, ...]]:
    """Work in file order, split where a part would pass `limit`; only stacked tensors are split themselves.

    Tensors of whole pages come first (by name), then the rest, so that the former start on pages.
    """
    parts: list[list[Work]] = [[]]
    room = limit
    for w in sorted(work, key=lambda w: (w.nbytes % PAGE != 0, w.item.name)):
        while True:
            if w.nbytes <= room:
                parts[-1].append(w)
                room -= w.nbytes
                break
            fit = room // (w.nbytes // (w.stop - w.start)) if w.form.stack else 0
            if fit:
                parts[-1].append(Work(item=w.item, form=w.form, start=w.start, stop=w.start + fit))
                w = Work(item=w.item, form=w.form, start=w.start + fit, stop=w.stop)
            elif not parts[-1]:
                parts[-1].append(w)
                break
            parts.append([])
            room = limit
    return [tuple(p) for p in parts if p]


def _job(
    number: int, ordinal: int, label: str, chosen: dict[Store, tuple[Work, ...]], mesh: Mesh, ranks: tuple[int, ...]
) -> Job:
    files: dict[tuple[Store, int], FilePlan] = {}
    for kind, work in chosen.items():
        layouts = ",".join(sorted({w.form.layout for w in work}))
        base = {"format": "pt", "kiln.format": FORMAT_VERSION, "kiln.mesh": str(mesh), "kiln.layouts": layouts}
        if kind == "rank":
            for rank in ranks:
                path = f"weights/rank-{rank:02d}/part-{number:02d}.safetensors"
                files[kind, rank] = FilePlan(path=path, rank=rank, work=work, metadata={**base, "kiln.rank": str(rank)})
        else:
            path = (
                f"weights/common/part-{number:02d}.safetensors"
                if kind == "common"
                else f"vision/part-{ordinal:02d}.safetensors"
            )
            files[kind, 0] = FilePlan(path=path, rank=None, work=work, metadata=base)
    return Job(number=number, label=label, store=chosen, files=files)
