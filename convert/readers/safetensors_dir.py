"""A checkpoint folder: many safetensors files, with or without an index. Headers first, then pread by range."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.readers.files import Files
from convert.readers.safetensors_file import read_header
from convert.readers.source import Identity, TensorInfo
from specs.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"


class SafetensorsDir:
    """A Source over a folder. Every disagreement between index and headers is an error, all listed at once."""

    def __init__(self, path: Path, identity: Identity | None = None) -> None:
        self.path = path
        self.config: Mapping[str, Any] = _json(path / "config.json")
        self.tensors = _tensors(path)
        self.header = {name: (t.dtype, t.shape) for name, t in self.tensors.items()}
        self._paths = sorted(map(Path, {t.file for t in self.tensors.values()}))
        self.identity = identity or _identity(path, self._paths)
        self._files = Files()

    @property
    def state(self) -> str:
        """Digest of every file's name, size and modification time."""
        stats = [(p.name, s.st_size, s.st_mtime_ns) for p in self._paths for s in (p.stat(),)]
        return hashlib.sha256(json.dumps(stats).encode()).hexdigest()

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows low..high as flat uint8; SourceError if the file ends early."""
        t = self.tensors[name]
        row = (t.stop - t.start) // max(1, t.shape[0]) if t.shape else t.stop - t.start
        return self._files.read(Path(t.file), t.start + low * row, (high - low) * row, name)

    def leading(self, name: str) -> int:
        return 1

    def close(self) -> None:
        self._files.close()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as e:
        raise SourceError(f"{path}: cannot be read: {e.strerror}; a checkpoint folder has one") from e
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise SourceError(f"{path}: found a {type(value).__name__}, expected an object")
    return value


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder, index and headers compared both ways."""
    index = folder / INDEX
    weight_map: Mapping[str, str] = {}
    if index.exists():
        found = _json(index).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
            raise SourceError(f"{index}: weight_map is missing or no map of strings")
        weight_map = found
    present = {p.name: p for p in folder.glob("*.safetensors")}
    named = set(weight_map.values())
    escaping = sorted(f for f in named if Path(f).name != f)
    missing = sorted(named - set(present) - set(escaping))
    problems = [f"{index}: file name {f!r} leads out of the folder" for f in escaping]
    problems += [f"{folder / f}: named by {INDEX} but not there; download it again" for f in missing]
    if not present:
        problems.append(f"{folder}: no *.safetensors files; expected a checkpoint folder")
    tensors: dict[str, TensorInfo] = {}
    for name in sorted(present):
        try:
            header = read_header(present[name])
        except SourceError as e:
            problems += e.problems
            continue
        for tensor, info in header.items():
            if tensor in tensors:
                problems.append(f"{tensor}: is in two files, {tensors[tensor].file} and {info.file}")
            tensors[tensor] = info
            if weight_map and weight_map.get(tensor) != name:
                where = f"maps it to {weight_map[tensor]}" if tensor in weight_map else "does not name it"
                problems.append(f"{tensor}: is in {present[name]}, but {INDEX} {where}")
    if not problems:
        problems += [
            f"{t}: {INDEX} maps it to {f}, which does not hold it" for t, f in weight_map.items() if t not in tensors
        ]
    if problems:
        raise SourceError(problems)
    return tensors


def _identity(folder: Path, files: list[Path]) -> Identity:
    """Repository and commit when the folder is a hub cache snapshot; name, size and header digest of every file."""
    repo = revision = None
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        repo = folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        revision = folder.name
    return Identity(repo=repo, revision=revision, files=tuple(_file_record(p) for p in files))


def _file_record(path: Path) -> dict[str, Any]:
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        digest = hashlib.sha256(f.read(length)).hexdigest()
    return {"name": path.name, "size": path.stat().st_size, "header_sha256": digest}
