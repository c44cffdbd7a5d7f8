"""A finished artifact's own papers, read strictly: manifest, small files by digest, index files entry by entry."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from convert.readers.strict_json import brief
from convert.shard.plan import Store
from convert.shard.seal import INDEX
from specs import manifest
from specs.errors import ArtifactError, CutError
from specs.fold import count
from specs.mesh import Mesh
from specs.storage import ITEM_BYTES

Entry = dict[str, Any]
Indices = dict[tuple[Store, int], dict[str, list[Entry]]]
DATA = ".safetensors"
MOST_TENSORS = 10_000_000
DRAFTS = "draft"


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A manifest whose every field has been looked at. files: path -> (size, sha256)."""

    path: Path
    manifest: dict[str, Any]
    mesh: Mesh
    files: dict[str, tuple[int, str]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those whose files it holds: all, unless it was converted for some."""
        return tuple(self.manifest.get("ranks", range(self.mesh.world)))

    @property
    def whole(self) -> bool:
        return len(self.ranks) == self.mesh.world

    def require_whole(self) -> None:
        """ArtifactError if it is a part: what needs all ranks cannot be done with it."""
        if not self.whole:
            raise ArtifactError(f"{self.path}: {self.held}; this takes an artifact of all ranks")

    @property
    def held(self) -> str:
        return f"holds ranks {', '.join(map(str, self.ranks))} of {self.mesh.world} only"

    @property
    def small(self) -> dict[str, tuple[int, str]]:
        """Everything but the tensors: index files, config, tokenizer, licences."""
        return {p: f for p, f in self.files.items() if not p.endswith(DATA)}

    def small_problems(self) -> list[str]:
        """Small files that are not what the manifest says: they decide how the large ones are read."""
        problems = []
        for path in sorted(self.small):
            problems += self.presence(path) or self.changes(path)
        return problems

    def presence(self, path: str) -> list[str]:
        """A file that is missing or of another size."""
        size, target = self.files[path][0], self.path / path
        if not target.is_file():
            return [f"{target}: not there, expected {size} bytes; fetch or convert again"]
        if target.stat().st_size != size:
            return [f"{target}: {target.stat().st_size} bytes, expected {size}; fetch or convert again"]
        return []

    def changes(self, path: str) -> list[str]:
        """A small file of another digest."""
        target, want = self.path / path, self.files[path][1]
        try:
            found = hashlib.sha256(target.read_bytes()).hexdigest()
        except OSError as e:
            return [f"{target}: cannot be read: {e.strerror or e}"]
        return [] if found == want else [f"{target}: sha256 {found}, expected {want}; fetch or convert again"]


def read_sealed(path: Path) -> Sealed:
    """The manifest in `path`, every field of the right form; ArtifactError otherwise."""
    found = manifest.read(path)
    where = path / manifest.NAME
    problems = list(_field_problems(found))
    if problems:
        raise ArtifactError([f"{where}: {p}" for p in problems])
    try:
        mesh = Mesh(**found["mesh"])
    except CutError as e:
        raise ArtifactError([f"{where}: mesh: {p}" for p in e.problems]) from e
    if not all(r < mesh.world for r in found.get("ranks", ())):
        raise ArtifactError(f"{where}: ranks: found {brief(found['ranks'])}, {mesh} has 0..{mesh.world - 1}")
    files = {f["path"]: (f["size"], f["sha256"]) for f in found["files"]}
    return Sealed(path=path, manifest=found, mesh=mesh, files=files)


def drafts(artifact: Path) -> list[Path]:
    """The folders of an artifact's finished drafts."""
    return sorted(p.parent for p in artifact.glob(f"{DRAFTS}/*/{manifest.NAME}"))


def read_draft(path: Path, target: Sealed) -> Sealed:
    """A draft's papers; ArtifactError if they are not right, or if it belongs to another target or mesh."""
    sealed = read_sealed(path)
    found, digest = sealed.manifest.get("target"), target.manifest["digest"]
    if found != digest or sealed.mesh != target.mesh:
        raise ArtifactError(
            f"{path / manifest.NAME}: is for target {brief(found)} on {sealed.mesh}, not {digest} on {target.mesh}; "
            f"delete {path} and add the draft again"
        )
    return sealed


def _field_problems(m: dict[str, Any]) -> Iterator[str]:
    """Fields that would mislead whoever reads on."""
    if set(m["mesh"]) != {"world", "tp", "ep"} or not all(type(v) is int for v in m["mesh"].values()):
        yield f"mesh: found {brief(m['mesh'])}, expected whole numbers for world, tp and ep"
    if not _is_sizes(m.get("ranks", [0])) or not m.get("ranks", [0]):
        yield f"ranks: found {brief(m['ranks'])}, expected the ranks whose files are there"
    if not isinstance(m["model"].get("spec"), str):
        yield f"model.spec: found {brief(m['model'].get('spec'))}, expected the name of a spec"
    if not all(isinstance(i, str) for i in m["layouts"]):
        yield f"layouts: found {brief(m['layouts'])}, expected names"
    if not all(isinstance(d, str) for d in m["logical"].values()):
        yield f"logical: found {brief(m['logical'])}, expected a digest for each part"
    for key, kind in (("files", list), ("bytes", int), ("tensors", int)):
        if not isinstance(m["source"].get(key), kind):
            yield f"source.{key}: found {brief(m['source'].get(key))}, expected {kind.__name__}"
    seen = set()
    for file in m["files"]:
        if not _is_file_record(file):
            yield f"files: found {brief(file)}, expected path inside the artifact, size and sha256"
        elif file["path"] in seen:
            yield f"files: {file['path']} is there twice"
        else:
            seen.add(file["path"])
    families = m["coverage"].get("consumed")
    if not isinstance(families, list) or not all(_is_family(f) for f in families):
        yield "coverage.consumed: expected a list of tensor families"
    elif sum(map(count, families)) > MOST_TENSORS:
        yield f"coverage.consumed: stands for more than {MOST_TENSORS:,} tensors"


def _is_file_record(file: object) -> bool:
    if not isinstance(file, dict) or set(file) < {"path", "size", "sha256"}:
        return False
    path, size = file["path"], file["size"]
    if not isinstance(path, str) or not isinstance(file["sha256"], str) or type(size) is not int or size < 0:
        return False
    pure = PurePosixPath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts and str(pure) == path and "\0" not in path


def _is_family(f: object) -> bool:
    if not isinstance(f, dict) or not all(isinstance(f.get(k), str) for k in ("pattern", "dtype")):
        return False
    shape, index = f.get("shape"), f.get("index")
    if not _is_sizes(shape) or not isinstance(index, list) or f["dtype"] not in ITEM_BYTES:
        return False
    holes, rest = f["pattern"].count("{}"), f["pattern"].replace("{}", "")
    if index and (holes != len(index) or "{" in rest or "}" in rest):
        return False
    runs = [r for axis in index if isinstance(axis, list) for r in axis]
    return all(isinstance(a, list) for a in index) and all(_is_sizes(r, 2) and r[0] <= r[1] for r in runs)


def _is_sizes(value: object, length: int | None = None) -> bool:
    """A list of whole numbers from zero up."""
    good = isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)
    return good and (length is None or len(value) == length)  # type: ignore[arg-type]


def read_indices(sealed: Sealed) -> Indices:
    """(store, rank) -> tensor name -> its entries, in order of `start`; each entry gains the `path` of its file.

    Raises ArtifactError for index files that are damaged or name files that the manifest does not.
    """
    folders: dict[tuple[Store, int], str] = {("common", 0): "weights/common", ("vision", 0): "vision"}
    folders |= {("rank", r): f"weights/rank-{r:02d}" for r in sealed.ranks}
    out: Indices = {}
    problems: list[str] = []
    for key, folder in folders.items():
        entries: dict[str, list[Entry]] = defaultdict(list)
        where = f"{folder}/{INDEX}"
        if where in sealed.files:
            for entry in _entries(sealed, where, problems):
                entries[entry["name"]].append({**entry, "path": sealed.path / folder / entry["file"]})
        elif key[0] == "rank":
            problems.append(f"{sealed.path / manifest.NAME}: does not list {where}")
        for found in entries.values():
            found.sort(key=lambda entry: entry.get("start", 0))
        out[key] = dict(entries)
    if problems:
        raise ArtifactError(problems)
    return out


def _entries(sealed: Sealed, where: str, problems: list[str]) -> Iterator[Entry]:
    target = sealed.path / where
    bad = sealed.presence(where) or sealed.changes(where)
    if bad:
        problems += bad
        return
    tensors = manifest.read_json(target).get("tensors")
    if not isinstance(tensors, list):
        problems.append(f"{target}: tensors: expected a list")
        return
    folder = where.rpartition("/")[0]
    for i, entry in enumerate(tensors):
        if not _is_entry(entry):
            problems.append(f"{target}: tensors[{i}]: found {brief(entry)}, expected name, file, offset, shape, layout")
        elif f"{folder}/{entry['file']}" not in sealed.files:
            problems.append(f"{target}: {entry['name']}: lies in {entry['file']}, which the manifest does not list")
        else:
            yield entry


def _is_entry(e: object) -> bool:
    if not isinstance(e, dict) or not all(isinstance(e.get(k), str) for k in ("name", "file", "dtype", "sha256")):
        return False
    layout, experts = e.get("layout"), e.get("experts", [0, 0])
    if not isinstance(layout, dict) or not isinstance(layout.get("id"), str) or not _is_sizes(e.get("shape")):
        return False
    if not all(type(v) is int for k, v in layout.items() if k != "id") or not _is_sizes(experts, 2):
        return False
    offset, start = e.get("offset"), e.get("start", 0)
    return e["dtype"] in ITEM_BYTES and type(offset) is int and offset >= 0 and type(start) is int
