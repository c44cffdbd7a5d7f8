"""Is this artifact what it says, and what it was made from?"""

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from convert import provenance
from convert.readers.artifact import ArtifactSource
from convert.readers.safetensors_file import read_header_and_metadata
from convert.readers.sealed import DRAFTS, Sealed, drafts, read_draft, read_indices, read_sealed
from convert.readers.source import Source
from convert.repack.compare import Sample, contents
from convert.repack.engine import one_thread_per_op
from specs import manifest
from specs.errors import ArtifactError, InputError
from specs.mesh import Mesh
from specs.storage import nbytes

Mode = Literal["quick", "sample", "full"]
CHUNK = 8 << 20
# Folders that are sealed on their own and may be added to a finished artifact.
ADDED = ("kernels", "tuning")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """problems: one line each, naming file, and tensor or expert. logical: digests by part and draft, recomputed if the
    mode is full.

    bytes_checked of bytes_total are the stored bytes whose digest was taken.
    """

    mode: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    logical: dict[str, str]
    bytes_checked: int
    bytes_total: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    path: Path,
    mode: Mode = "full",
    against: Source | None = None,
    workers: int = 1,
    progress: Callable[[int], None] = lambda n: None,
    sample: Sample | None = None,
) -> Verdict:
    """Checks an artifact and its drafts.

    quick: manifest, every file's size and header, and the digests of all small files. sample: also the digests of some
    stored tensors of every rank. full: also every file's sha256, and the logical digests by unpacking every tensor.
    `against`: also every INT4 code, scale and dense element (of a sample: the chosen ones) equal to that source; a
    draft is compared with its own source when `path` is the draft's folder.
    """
    sealed = read_sealed(path)
    verdict = _verify(sealed, mode, against, workers, progress, sample)
    for folder in drafts(path):
        try:
            own = _verify(read_draft(folder, sealed), mode, None, workers, progress, sample)
        except ArtifactError as e:
            verdict = replace(verdict, problems=(*verdict.problems, *e.problems))
            continue
        verdict = Verdict(
            mode=verdict.mode,
            problems=verdict.problems + own.problems,
            warnings=verdict.warnings + own.warnings,
            logical=verdict.logical | {f"draft {folder.name}": digest for digest in own.logical.values()},
            bytes_checked=verdict.bytes_checked + own.bytes_checked,
            bytes_total=verdict.bytes_total + own.bytes_total,
        )
    return verdict


def _verify(
    sealed: Sealed,
    mode: Mode,
    against: Source | None,
    workers: int,
    progress: Callable[[int], None],
    sample: Sample | None,
) -> Verdict:
    """One seal: an artifact's own or a draft's."""
    path = sealed.path
    found = Findings(sealed)
    if mode == "full":
        found.problems += files_problems(sealed, workers, progress)
        found.checked = sum(size for size, _ in sealed.files.values())
    elif mode == "sample" and not found.problems:
        assert sample is not None
        found.problems += sample_problems(sealed, sample, workers, progress, found)
    if not sealed.whole and against is None:
        found.warnings.append(
            f"{path}: {sealed.held}; the logical digest was taken while converting, a part cannot give it again"
        )
        return found.verdict("files" if mode == "full" else mode, sealed.manifest["logical"])
    if mode == "quick" or found.problems or (mode == "sample" and against is None):
        return found.verdict(mode, sealed.manifest["logical"])
    source = ArtifactSource(path)
    try:
        with one_thread_per_op():
            logical, differences = contents(source, against, workers, progress, sample if mode == "sample" else None)
    finally:
        source.close()
    found.problems += differences
    if mode == "sample":
        return found.verdict(mode, sealed.manifest["logical"])
    for part, digest in sealed.manifest["logical"].items():
        if logical.get(part) != digest:
            found.problems.append(
                f"{path / manifest.NAME}: logical digest of {part} is {digest}, the tensors give {logical.get(part)}"
            )
    return found.verdict(mode, logical)


class Findings:
    """What can be said before any tensor is read: papers, sizes, headers; then whatever the checks add."""

    def __init__(self, sealed: Sealed) -> None:
        self.sealed, self.checked = sealed, 0
        path = sealed.path
        papers = path / manifest.NAME
        self.warnings = list(strangers(sealed))
        self.problems = [p for name in sorted(sealed.files) for p in sealed.presence(name)]
        self.problems += [p for name in sealed.small if not sealed.presence(name) for p in sealed.changes(name)]
        if papers.read_bytes() != manifest.canonical(sealed.manifest):
            self.problems.append(f"{papers}: was changed after sealing")
        self.problems += provenance.problems(path)
        if not self.problems:
            self.problems += headers_problems(sealed)

    def verdict(self, mode: str, logical: dict[str, str]) -> Verdict:
        return Verdict(
            mode=mode,
            problems=tuple(dict.fromkeys(self.problems)),
            warnings=tuple(self.warnings),
            logical=logical,
            bytes_checked=self.checked,
            bytes_total=sum(size for size, _ in self.sealed.files.values()),
        )


def strangers(sealed: Sealed) -> Iterator[str]:
    """Files that nobody sealed, and folders whose own seal this check does not read."""
    known = {*sealed.files, manifest.NAME, provenance.NAME, "README.md"}
    added, unfinished, finished = set(), set(), drafts(sealed.path)
    for file in sorted(p for p in sealed.path.rglob("*") if not p.is_dir()):
        name = file.relative_to(sealed.path)
        if name.parts[0] in ADDED:
            added.add(name.parts[0])
        elif name.parts[0] == DRAFTS and len(name.parts) > 2:
            if sealed.path / DRAFTS / name.parts[1] not in finished:
                unfinished.add(name.parts[1])
        elif str(name) not in known:
            yield f"{file}: is not part of this artifact"
    for draft in sorted(unfinished):
        yield f"{sealed.path / DRAFTS / draft}: is an unfinished draft; the command that began it goes on with it"
    for other in sorted(added):
        yield f"{sealed.path / other}: has a seal of its own, which this check does not cover"


def headers_problems(sealed: Sealed) -> list[str]:
    """Every part's safetensors header against the index of its folder, and both against the manifest's mesh."""
    problems: list[str] = []
    by_file: dict[Path, dict[str, dict[str, Any]]] = defaultdict(dict)
    try:
        indices = read_indices(sealed)
    except ArtifactError as e:
        return list(e.problems)
    for entries in indices.values():
        for found in entries.values():
            for entry in found:
                by_file[entry["path"]][entry["name"]] = entry
    listed = {sealed.path / f for f in sealed.files if f.endswith(".safetensors")}
    for file in sorted(listed ^ set(by_file)):
        problems.append(f"{file}: is in {'the manifest' if file in listed else 'an index.json'} only")
    for file in sorted(listed & set(by_file)):
        problems += _header_problems(file, by_file[file], sealed.mesh)
    return problems


def _header_problems(file: Path, entries: dict[str, dict[str, Any]], mesh: Mesh) -> Iterator[str]:
    try:
        header, metadata = read_header_and_metadata(file)
    except InputError as e:
        yield from e.problems
        return
    if metadata.get("kiln.mesh") != str(mesh):
        yield f"{file}: was made for mesh {metadata.get('kiln.mesh')!r}, the manifest says {mesh}"
    for name in sorted(set(header) ^ set(entries)):
        yield f"{file}: {name}: is in {'the file' if name in header else 'index.json'} only"
    for name in sorted(set(header) & set(entries)):
        entry, info = entries[name], header[name]
        want = (entry["dtype"], tuple(entry["shape"]), entry["offset"])
        if (info.dtype, info.shape, info.start) != want:
            yield f"{file}: {name}: header says {(info.dtype, info.shape, info.start)}, index.json {want}"


def files_problems(sealed: Sealed, workers: int, progress: Callable[[int], None]) -> Iterator[str]:
    """Every present file of the right size against its sha256."""
    present = [f for f in sorted(sealed.files) if f.endswith(".safetensors") and not sealed.presence(f)]
    with ThreadPoolExecutor(workers) as pool:
        for found in pool.map(partial(_hash_file, sealed, progress), present):
            yield from found


def _hash_file(sealed: Sealed, progress: Callable[[int], None], name: str) -> list[str]:
    """Problems of one file: its digest, and then which of its tensors changed."""
    target, (size, want) = sealed.path / name, sealed.files[name]
    try:
        found = sha256_of(target, 0, size, progress)
    except OSError as e:
        return [f"{target}: cannot be read: {e.strerror or e}"]
    if found == want:
        return []
    where = f"{target}: sha256 {found}, expected {want}"
    try:
        names = [f"tensor {e['name']}" for e in stored(sealed) if e["path"] == target and not _intact(e)]
    except InputError as e:
        return [where, *e.problems]
    return [f"{where}; changed: {', '.join(names) or 'nothing but the header'}"]


def stored(sealed: Sealed) -> Iterator[dict[str, Any]]:
    """Every entry of every index file."""
    for entries in read_indices(sealed).values():
        for found in entries.values():
            yield from found


def _intact(entry: dict[str, Any], progress: Callable[[int], None] = lambda n: None) -> bool:
    size = nbytes(tuple(entry["shape"]), entry["dtype"])
    return sha256_of(entry["path"], entry["offset"], size, progress) == str(entry["sha256"])


def sample_problems(
    sealed: Sealed, sample: Sample, workers: int, progress: Callable[[int], None], found: Findings
) -> Iterator[str]:
    """`sample.count` stored tensors of every rank, of the common ones and of the vision part, by their digests."""
    chosen: list[dict[str, Any]] = []
    for key, entries in sorted(read_indices(sealed).items()):
        every = [e for name in sorted(entries) for e in entries[name]]
        draw = random.Random(f"{sample.seed} {key}")
        chosen += draw.sample(every, min(sample.count, len(every)))
    found.checked = sum(nbytes(tuple(e["shape"]), e["dtype"]) for e in chosen)
    found.checked += sum(size for size, _ in sealed.small.values())
    with ThreadPoolExecutor(workers) as pool:
        for entry, good in zip(chosen, pool.map(partial(_intact, progress=progress), chosen), strict=True):
            if not good:
                yield f"{entry['path']}: tensor {entry['name']}: its sha256 is not the one in index.json"


def sha256_of(path: Path, start: int, size: int, progress: Callable[[int], None] = lambda n: None) -> str:
    """sha256 of bytes start..start+size of a file."""
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
