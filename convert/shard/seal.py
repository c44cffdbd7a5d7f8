"""The end of a conversion: index files, side files, and the manifest, which makes the folder an artifact."""

import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from convert import card
from convert.readers.source import Source
from convert.shard.plan import FORMAT_VERSION, FilePlan, Plan, Work, ways
from convert.shard.writer import write_file
from specs import manifest
from specs.errors import ArtifactError
from specs.fold import fold
from specs.mesh import cut

INDEX = "index.json"
Records = dict[int, dict[str, Any]]


def seal(plan: Plan, source: Source, out: Path, records: Records) -> dict[str, str]:
    """Writes everything beside the parts, the manifest last; the logical digests. Same plan and source: same bytes."""
    files = {
        path: {"size": r["size"], "sha256": r["sha256"]} for rec in records.values() for path, r in rec["files"].items()
    }
    logical = _logical(plan, records)
    _as_sealed_before(source, logical)
    beside = [(p.name, p.read_bytes()) for p in source.side_files()]
    # A draft lies inside an artifact, whose card tells of it.
    told = [] if plan.bound else [(card.NAME, card.card(plan, source.identity, logical, dict(beside)).encode())]
    for path, data in [*_indices(plan, records), *beside, *told]:
        write_file(out / path, data)
        files[path] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    consumed = {n: s for n, s in plan.header.items() if n not in plan.expanded.dropped}
    body: dict[str, Any] = {
        "plan": plan.digest,
        **plan.bound,
        "model": {"family": plan.spec.family, "spec": plan.spec.name, "spec_digest": plan.spec.digest},
        "mesh": {"world": plan.mesh.world, "tp": plan.mesh.tp, "ep": plan.mesh.ep},
        **({} if plan.whole else {"ranks": list(plan.ranks)}),
        "layouts": sorted({w.form.layout for f in plan.files for w in f.work}),
        "parts": sorted({i.family.part for i in plan.expanded.items}),
        "source": {**source.identity.record(), "tensors": len(plan.header), "bytes": plan.source_bytes},
        "logical": logical,
        "coverage": {
            "consumed": fold(consumed),
            "dropped": [{"name": n, "why": w} for n, w in sorted(plan.expanded.dropped.items())],
        },
        "files": [{"path": path, **files[path]} for path in sorted(files)],
    }
    write_file(out / manifest.NAME, manifest.sealed(body))
    return logical


def _as_sealed_before(source: Source, logical: dict[str, str]) -> None:
    """ArtifactError if an artifact's tensors are no longer those it was sealed with."""
    if source.logical is not None and dict(source.logical) != logical:
        parts = sorted(p for p in {*logical, *source.logical} if logical.get(p) != source.logical.get(p))
        raise ArtifactError(
            f"{source.path}: the tensors of {', '.join(parts)} are not those it was sealed with, so nothing is sealed "
            f"from them; `kiln verify {source.path}` names what changed"
        )


def _logical(plan: Plan, records: Records) -> dict[str, str]:
    """Logical digest of every part, from the digests taken while reading."""
    parts: dict[str, dict[str, tuple[str, tuple[int, ...], str]]] = defaultdict(dict)
    for record in records.values():
        for name, sha in record["sources"].items():
            parts[plan.expanded.parts[name]][name] = (*plan.header[name], sha)
    hashed = {n for lines in parts.values() for n in lines}
    unread = [n for n in plan.expanded.expected if n not in hashed and not n.endswith(".weight_shape")]
    assert not unread, f"no step read {unread[:3]}"
    return {part: manifest.logical_digest(lines) for part, lines in sorted(parts.items())}


def _indices(plan: Plan, records: Records) -> list[tuple[str, bytes]]:
    """index.json of every store folder: one entry per stored tensor."""
    folders: dict[str, list[dict[str, Any]]] = defaultdict(list)
    ranks: dict[str, int | None] = {}
    for job in plan.jobs:
        for file in job.files.values():
            folder, name = file.path.rsplit("/", 1)
            ranks[folder] = file.rank
            digests = records[job.number]["files"][file.path]["tensors"]
            folders[folder] += _entries(plan, file, name, digests)
    return [
        (
            f"{folder}/{INDEX}",
            manifest.canonical(
                {"version": FORMAT_VERSION, "mesh": str(plan.mesh), "rank": ranks[folder], "tensors": entries}
            ),
        )
        for folder, entries in sorted(folders.items())
    ]


def _entries(plan: Plan, file: FilePlan, name: str, digests: dict[str, str]) -> list[dict[str, Any]]:
    entries, at = [], len(file.header)
    for work in file.work:
        entries.append(
            {
                "name": work.item.name,
                "file": name,
                "offset": at,
                "dtype": work.form.dtype,
                "shape": list(work.shape),
                "layout": {"id": work.form.layout, **work.form.parameters},
                "logical": [list(s) for s in work.form.shapes],
                **_place(plan, work, file.rank),
                "sha256": digests[work.item.name],
            }
        )
        at += work.nbytes
    return entries


def _place(plan: Plan, work: Work, rank: int | None) -> dict[str, Any]:
    """Which part of the whole tensor this is: the cut axis, and the experts in this file."""
    family = work.item.family
    place: dict[str, Any] = {}
    axis, n = ways(family, plan.mesh)
    if rank is not None and n > 1 and family.split_axis is not None:
        place["cut"] = {
            "axis": family.row.axes[family.split_axis],
            "over": axis,
            "index": plan.mesh.index(axis, rank),
            "of": n,
        }
    if work.form.stack:
        groups = family.stack // work.form.stack
        first = cut(family.stack, groups, plan.mesh.index("ep", rank or 0) if groups > 1 else 0)[0]
        place["experts"] = [first + work.start, first + work.stop]
        place["start"] = work.start
    return place
