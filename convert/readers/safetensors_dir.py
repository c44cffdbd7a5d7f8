"""A checkpoint folder: many safetensors files, with or without an index. Headers first, then pread by range."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.readers.files import Files
from convert.readers.join import INDEX, file_problems, join, weight_map
from convert.readers.safetensors_file import read_header
from convert.readers.source import Identity, TensorInfo, side_files
from convert.readers.strict_json import parse_object
from specs.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor


class SafetensorsDir:
    """A Source over a folder. Every disagreement between index and headers is an error, all listed at once."""

    def __init__(self, path: Path, identity: Identity | None = None) -> None:
        self.path = path
        self.config: Mapping[str, Any] = read_object(path / "config.json")
        self.tensors = _tensors(path)
        self.header = {name: (t.dtype, t.shape) for name, t in self.tensors.items()}
        self._paths = sorted(map(Path, {t.file for t in self.tensors.values()}))
        self.identity = identity or _identity(path, self._paths)
        self.logical: Mapping[str, str] | None = None
        self._files = Files()

    @property
    def state(self) -> str:
        """Digest of every file's name, size and modification time."""
        stats = [(p.name, s.st_size, s.st_mtime_ns) for p in self._paths for s in (p.stat(),)]
        return hashlib.sha256(json.dumps(stats).encode()).hexdigest()

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows low..high as flat uint8; SourceError if the file ends early."""
        return self._files.read(*self._place(name, low, high), name)

    def soon(self, name: str, low: int, high: int) -> None:
        self._files.soon(*self._place(name, low, high))

    def _place(self, name: str, low: int, high: int) -> tuple[Path, int, int]:
        """File, first byte and size of rows."""
        t = self.tensors[name]
        row = (t.stop - t.start) // max(1, t.shape[0]) if t.shape else t.stop - t.start
        return Path(t.file), t.start + low * row, (high - low) * row

    def stage(self, jobs: Mapping[int, Collection[str]], folder: Path) -> None:
        """Nothing: the files are here."""

    def leading(self, name: str) -> int:
        return 1

    def side_files(self) -> Iterator[Path]:
        return side_files(self.path)

    def close(self) -> None:
        self._files.close()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint; SourceError if the file is none."""
    try:
        if path.exists() and not path.is_file():
            raise SourceError(f"{path}: is not a file")
        raw = path.read_bytes()
    except OSError as e:
        raise SourceError(f"{path}: cannot be read: {e.strerror}; a checkpoint folder has one") from e
    return parse_object(str(path), raw)


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder, index and headers compared both ways."""
    index = folder / INDEX
    mapped = weight_map(str(index), read_object(index)) if index.exists() else {}
    present = {p.name: p for p in folder.glob("*.safetensors")}
    problems = list(file_problems(str(folder), mapped, present))
    if not present:
        problems.append(f"{folder}: no *.safetensors files; expected a checkpoint folder")
    headers: dict[str, dict[str, TensorInfo]] = {}
    for name in sorted(present):
        try:
            headers[name] = read_header(present[name])
        except SourceError as e:
            problems += e.problems
    tensors, differences = join(headers, mapped)
    if problems or differences:
        raise SourceError([*problems, *differences])
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
