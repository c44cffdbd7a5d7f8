"""What of an artifact goes to the hub, in which commits, and whether the hub would take it."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

from convert import card, provenance
from convert.hub.tree import Local
from convert.readers.sealed import DRAFTS, Sealed, drafts, read_draft, read_sealed
from convert.readers.source import LICENCE_GLOBS
from specs import manifest
from specs.errors import ArtifactError

# Plain HTTP downloads refuse larger files; the hub's own limits are ten times that.
MOST_BYTES = 50_000_000_000
MOST_FILES = 100_000
MOST_IN_FOLDER = 10_000
# The hub gives a commit a minute and advises 50 to 100 files.
MOST_IN_COMMIT = 100
LARGE_REPO = 1_000_000_000_000
LAST = (manifest.NAME, card.NAME)
# Whatever else the repository may hold, these folders are the artifact's alone.
OWNED = ("weights/", "vision/")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An artifact ready for the hub. commits: label -> its files by path, in order; the last one holds the manifest."""

    digest: str
    files: dict[str, Local]
    commits: dict[str, dict[str, Local]]
    warnings: tuple[str, ...]


def bundle(path: Path) -> Bundle:
    """The artifact in `path`; ArtifactError with everything that keeps it from being published."""
    sealed = read_sealed(path)
    sealed.require_whole()
    problems = [p for name in sorted(sealed.files) for p in sealed.presence(name)] or sealed.small_problems()
    files = {name: Local(path / name, size, digest) for name, (size, digest) in sealed.files.items()}
    files[manifest.NAME] = _local(path / manifest.NAME)
    for rows, wrong in (_kernels(sealed), _drafts(sealed), _tuning(path)):
        files |= rows
        problems += wrong
    present = {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if not p.is_dir()}
    problems += limits(path, present)
    # Who converted, where and by which command is nobody else's business.
    strangers = sorted(n for n in set(present) - set(files) if not _own_papers(n))
    problems += [f"{path / n}: is no part of the artifact; move it away" for n in strangers]
    problems += _no_licence(path, files)
    if problems:
        raise ArtifactError(problems)
    total = sum(f.size for f in files.values())
    warnings = (f"{total / 1e12:.2f} TB: above 1 TB the hub wants a plan or a grant",) if total > LARGE_REPO else ()
    return Bundle(digest=sealed.manifest["digest"], files=files, commits=_commits(files), warnings=warnings)


def _no_licence(where: Path, files: Collection[str]) -> list[str]:
    if any(fnmatch(n, glob) for n in files for glob in LICENCE_GLOBS):
        return []
    return [f"{where}: has no {' or '.join(LICENCE_GLOBS)}; weights must not be published without their licence"]


def limits(where: Path, sizes: Mapping[str, int]) -> Iterator[str]:
    """What the hub would refuse of these files (path -> bytes)."""
    for name, size in sorted(sizes.items()):
        if size > MOST_BYTES:
            yield f"{where / name}: {size / 1e9:.1f} GB, a file on the hub has at most {MOST_BYTES / 1e9:.0f} GB"
    if len(sizes) > MOST_FILES:
        yield f"{where}: {len(sizes):,} files, a repository has at most {MOST_FILES:,}"
    for folder, count in sorted(Counter(name.rpartition("/")[0] for name in sizes).items()):
        if count > MOST_IN_FOLDER:
            yield f"{where / folder}: {count:,} files, a folder has at most {MOST_IN_FOLDER:,}"


def _commits(files: Mapping[str, Local]) -> dict[str, dict[str, Local]]:
    """Small files with the licence first, then folder by folder; drafts' seals after all weights, the manifest last."""
    groups: dict[str, dict[str, Local]] = {}
    for name in sorted(files, key=lambda n: (n.count("/") > 0, is_seal(n), n)):
        if name not in LAST:
            label = "seals of drafts" if is_seal(name) else name.rpartition("/")[0] or "configuration and licence"
            groups.setdefault(label, {})[name] = files[name]
    out: dict[str, dict[str, Local]] = {}
    for label, group in groups.items():
        names = list(group)
        for at in range(0, len(names), MOST_IN_COMMIT):
            part = "" if len(names) <= MOST_IN_COMMIT else f", part {at // MOST_IN_COMMIT + 1}"
            out[label + part] = {n: group[n] for n in names[at : at + MOST_IN_COMMIT]}
    return {**out, "manifest and card": {n: files[n] for n in LAST if n in files}}


def is_seal(name: str) -> bool:
    """Is this a draft's manifest?"""
    return name.endswith(f"/{manifest.NAME}")


def _own_papers(name: str) -> bool:
    """Provenance of the artifact or of a draft."""
    parts = name.split("/")
    return parts[-1] == provenance.NAME and (len(parts) == 1 or (len(parts) == 3 and parts[0] == DRAFTS))


def _local(path: Path) -> Local:
    data = path.read_bytes()
    return Local(path, len(data), sha256(data).hexdigest())


Found = tuple[dict[str, Local], list[str]]


def _kernels(sealed: Sealed) -> Found:
    """kernels/<arch>: the index and the cubins it lists, bound to these weights."""
    files: dict[str, Local] = {}
    problems: list[str] = []
    for index in sorted(sealed.path.glob("kernels/*/index.json")):
        found = manifest.read_json(index)
        folder = index.parent.relative_to(sealed.path)
        files[f"{folder}/index.json"] = _local(index)
        if found.get("weights") != sealed.manifest["digest"]:
            problems.append(
                f"{index}: was compiled for other weights; run `kiln-run compile {sealed.path} --arch {folder.name}`"
            )
        _listed(folder, sealed.path, found.get("kernels"), files, problems)
    return files, problems


def _drafts(sealed: Sealed) -> Found:
    """draft/<name>: its own manifest and the files it lists, its licence among them, bound to these weights."""
    files: dict[str, Local] = {}
    problems: list[str] = []
    for folder in drafts(sealed.path):
        own, name = read_draft(folder, sealed), folder.relative_to(sealed.path)
        problems += [p for n in sorted(own.files) for p in own.presence(n)] or own.small_problems()
        files |= {f"{name}/{n}": Local(folder / n, size, digest) for n, (size, digest) in own.files.items()}
        files[f"{name}/{manifest.NAME}"] = _local(folder / manifest.NAME)
        problems += _no_licence(folder, own.files)
    return files, problems


def _listed(folder: Path, root: Path, rows: Any, files: dict[str, Local], problems: list[str]) -> None:
    """Files that a seal of its own lists, each with its sha256 compared."""
    for row in rows if isinstance(rows, list) else ():
        target = root / folder / str(row.get("file"))
        if not target.is_file():
            problems.append(f"{target}: listed but not there")
            continue
        local = files[str(folder / str(row["file"]))] = _local(target)
        if local.sha256 != row.get("sha256"):
            problems.append(f"{target}: sha256 {local.sha256}, expected {row.get('sha256')}")


def _tuning(path: Path) -> Found:
    return {f"tuning/{p.name}": _local(p) for p in sorted(path.glob("tuning/*.json"))}, []
