"""Is this artifact what it says, and what it was made from?"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from convert.pipeline import PROVENANCE
from convert.readers.artifact import ArtifactSource, read_indices
from convert.readers.files import as_bytes
from convert.readers.safetensors_file import read_header_and_metadata
from convert.readers.source import Source
from convert.repack.assemble import BLOCK_BYTES
from convert.repack.engine import one_thread_per_op
from specs import manifest
from specs.errors import ArtifactError, InputError
from specs.expand import tensor_names
from specs.mesh import Mesh
from specs.storage import nbytes

Mode = Literal["quick", "full"]
CHUNK = 8 << 20
# Folders that are sealed on their own and may be added to a finished artifact.
ADDED = ("draft", "kernels", "tuning")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """problems: one line each, naming file, and tensor or expert. logical: digests, recomputed unless mode is quick."""

    mode: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    logical: dict[str, str]
    bytes_checked: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    path: Path,
    mode: Mode = "full",
    against: Source | None = None,
    workers: int = 1,
    progress: Callable[[int], None] = lambda n: None,
) -> Verdict:
    """Checks an artifact.

    quick: manifest, file sizes and headers. full: also every file's sha256, and the logical digests by unpacking every
    tensor. `against`: also every INT4 code, scale and dense element equal to that source, bit for bit.
    """
    sealed = manifest.read(path)
    problems = _sizes(path, sealed)
    warnings = _strangers(path, sealed)
    if not problems:
        problems = _headers(path, sealed)
    checked = 0
    if mode == "full" and not any("not there" in p for p in problems):
        damaged = list(_hashes(path, sealed, workers, progress))
        problems += damaged
        checked = sum(f["size"] for f in sealed["files"])
    if mode == "quick" or problems:
        return Verdict(
            mode=mode,
            problems=tuple(problems),
            warnings=tuple(warnings),
            logical=sealed["logical"],
            bytes_checked=checked,
        )
    source = ArtifactSource(path)
    try:
        with one_thread_per_op():
            logical, differences = _contents(source, against, workers, progress)
    finally:
        source.close()
    problems += differences
    for part, digest in sealed["logical"].items():
        if logical.get(part) != digest:
            problems.append(
                f"{path / manifest.NAME}: logical digest of {part} is {digest}, the tensors give {logical.get(part)}"
            )
    return Verdict(
        mode=mode, problems=tuple(problems), warnings=tuple(warnings), logical=logical, bytes_checked=checked
    )


def _sizes(path: Path, sealed: dict[str, Any]) -> list[str]:
    problems = []
    for file in sealed["files"]:
        target = path / file["path"]
        if ".." in Path(file["path"]).parts or Path(file["path"]).is_absolute():
            problems.append(f"{path / manifest.NAME}: file name {file['path']!r} leads out of the artifact")
        elif not target.is_file():
            problems.append(f"{target}: not there, expected {file['size']} bytes; fetch or convert again")
        elif target.stat().st_size != file["size"]:
            problems.append(f"{target}: {target.stat().st_size} bytes, expected {file['size']}; fetch or convert again")
    return problems


def _strangers(path: Path, sealed: dict[str, Any]) -> list[str]:
    known = {f["path"] for f in sealed["files"]} | {manifest.NAME, PROVENANCE, "README.md"}
    names = (p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file())
    return [
        f"{path / n}: is not part of this artifact" for n in names if str(n) not in known and n.parts[0] not in ADDED
    ]


def _headers(path: Path, sealed: dict[str, Any]) -> list[str]:
    """Every part's safetensors header against the index of its folder, and both against the manifest's mesh."""
    problems: list[str] = []
    mesh = Mesh(**sealed["mesh"])
    by_file: dict[Path, dict[str, dict[str, Any]]] = defaultdict(dict)
    for entries in read_indices(path, mesh).values():
        for found in entries.values():
            for entry in found:
                by_file[entry["path"]][entry["name"]] = entry
    listed = {path / f["path"] for f in sealed["files"] if f["path"].endswith(".safetensors")}
    for file in sorted(listed ^ set(by_file)):
        problems.append(f"{file}: is in {'the manifest' if file in listed else 'an index.json'} only")
    for file in sorted(listed & set(by_file)):
        try:
            header, metadata = read_header_and_metadata(file)
        except InputError as e:
            problems += e.problems
            continue
        if metadata.get("kiln.mesh") != str(mesh):
            problems.append(f"{file}: was made for mesh {metadata.get('kiln.mesh')!r}, the manifest says {mesh}")
        for name in sorted(set(header) ^ set(by_file[file])):
            problems.append(f"{file}: {name}: is in {'the file' if name in header else 'index.json'} only")
        for name in sorted(set(header) & set(by_file[file])):
            entry, info = by_file[file][name], header[name]
            want = (entry["dtype"], tuple(entry["shape"]), entry["offset"])
            if (info.dtype, info.shape, info.start) != want:
                problems.append(
                    f"{file}: {name}: header says {(info.dtype, info.shape, info.start)}, index.json {want}"
                )
    return problems


def _hashes(path: Path, sealed: dict[str, Any], workers: int, progress: Callable[[int], None]) -> Iterator[str]:
    with ThreadPoolExecutor(workers) as pool:
        check = partial(_hash_file, path, Mesh(**sealed["mesh"]), progress)
        for found in pool.map(check, sealed["files"]):
            yield from found


def _hash_file(path: Path, mesh: Mesh, progress: Callable[[int], None], file: dict[str, Any]) -> list[str]:
    """Problems of one file: its digest, and then which of its tensors or experts changed."""
    target = path / file["path"]
    found = _sha256(target, 0, file["size"], progress)
    if found == file["sha256"]:
        return []
    where = f"{target}: sha256 {found}, expected {file['sha256']}"
    try:
        names = _damaged(target, mesh, path)
    except InputError as e:
        return [where, *e.problems]
    return [f"{where}; changed: {', '.join(names) or 'nothing but the header'}"]


def _damaged(target: Path, mesh: Mesh, path: Path) -> list[str]:
    if target.suffix != ".safetensors":
        return [target.name]
    names = []
    for entries in read_indices(path, mesh).values():
        for entry in (e for found in entries.values() for e in found if e["path"] == target):
            size = nbytes(tuple(entry["shape"]), entry["dtype"])
            if _sha256(target, entry["offset"], size) != entry["sha256"]:
                names.append(f"tensor {entry['name']}")
    return names


def _sha256(path: Path, start: int, size: int, progress: Callable[[int], None] = lambda n: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        f.seek(start)
        while size:
            data = f.read(min(CHUNK, size))
            if not data:
                raise ArtifactError(f"{path}: ends while being read")
            digest.update(data)
            progress(len(data))
            size -= len(data)
    return digest.hexdigest()


def _contents(
    source: ArtifactSource, against: Source | None, workers: int, progress: Callable[[int], None]
) -> tuple[dict[str, str], list[str]]:
    """Logical digests by unpacking, and the differences from `against`."""
    problems: list[str] = []
    if against is not None:
        problems = [
            f"{n}: is in {'the artifact' if n in source.header else 'the source'} only, or of another dtype or shape"
            for n in sorted({k for k, _ in set(source.header.items()) ^ set(against.header.items())})
        ]
    lines: dict[str, dict[str, tuple[str, tuple[int, ...], str]]] = defaultdict(dict)
    with ThreadPoolExecutor(workers) as pool:
        for digests, differences in pool.map(partial(_compare, source, against, progress), _bundles(source)):
            problems += differences
            for name, sha in digests.items():
                lines[source.expanded.parts[name]][name] = (*source.header[name], sha)
    return {part: manifest.logical_digest(found) for part, found in sorted(lines.items())}, problems


def _bundles(source: ArtifactSource) -> Iterator[list[str]]:
    """Source names that are unpacked together: one expert's, or one dense tensor."""
    seen: set[str] = set()
    for item in source.expanded.items:
        for stems in item.sources:
            names = [n for stem in stems for n in tensor_names(item.family.row.format, stem) if n not in seen]
            seen.update(names)
            if item.family.stack:
                yield names
            else:
                yield from ([n] for n in names)


def _compare(
    source: ArtifactSource, against: Source | None, progress: Callable[[int], None], names: list[str]
) -> tuple[dict[str, str], list[str]]:
    digests, problems = {}, []
    for name in names:
        digest, different, first = hashlib.sha256(), 0, -1
        dtype, shape = source.header[name]
        both = against is not None and against.header.get(name) == (dtype, shape)
        for low, high in _blocks(shape, dtype, source, name):
            mine = source.rows(name, low, high)
            digest.update(as_bytes(mine))
            if both and against is not None:
                theirs = against.rows(name, low, high)
                if not torch.equal(mine, theirs):
                    bad = (mine != theirs).nonzero()
                    first = first if different else low * (mine.numel() // (high - low)) + int(bad[0])
                    different += len(bad)
            progress(mine.numel())
        digests[name] = digest.hexdigest()
        if different:
            problems.append(
                f"{name}: {different} bytes differ from the source, the first at byte {first} of {dtype} {list(shape)}"
            )
    return digests, problems


def _blocks(shape: tuple[int, ...], dtype: str, source: ArtifactSource, name: str) -> Iterator[tuple[int, int]]:
    """Row ranges of at most BLOCK_BYTES, in whole heads."""
    step = source.leading(name)
    rows = max(1, BLOCK_BYTES // max(1, nbytes(shape, dtype) // shape[0]) // step) * step
    for low in range(0, shape[0], rows):
        yield low, min(shape[0], low + rows)
