"""Files of an artifact: written front to back under a temporary name, hashed on the way, final only when safe."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from convert.readers.files import as_bytes, hint
from convert.repack.clock import Clock
from convert.shard.plan import FilePlan
from specs.errors import OutputError

if TYPE_CHECKING:
    from torch import Tensor

UNFINISHED = ".part"


def draft(path: Path) -> Path:
    """A temporary name of its own beside the final one, even if several hosts write the same file."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")


def write_all(handle: int, data: memoryview) -> None:
    """The one call that puts bytes into a file."""
    while data:
        data = data[os.write(handle, data) :]


@contextmanager
def output_errors(path: Path) -> Iterator[None]:
    """OSError while writing -> OutputError that says what to do."""
    try:
        yield
    except OSError as e:
        raise OutputError(
            f"{path}: writing failed: {e.strerror or e}. Nothing unfinished keeps its final "
            "name; free some space or fix the device, then run the same command again: it goes on after the last "
            "finished part"
        ) from e


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes) -> None:
    """A small file, whole or not at all: temporary name, fsync, rename, fsync of the folder."""
    with output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = draft(path)
        handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(handle, memoryview(data))
            os.fsync(handle)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        unfinished.rename(path)
        sync_folder(path.parent)


class StreamWriter:
    """Appends to one planned file; sha256 of the file and of every tensor are ready when it is sealed."""

    def __init__(self, root: Path, plan: FilePlan, clock: Clock) -> None:
        self.plan, self.path, self.clock = plan, root / plan.path, clock
        self.draft = draft(self.path)
        self.tensors: dict[str, str] = {}
        self._sizes = [(w.item.name, w.nbytes) for w in plan.work]
        self._left = self._sizes[0][1]
        self._file, self._tensor = hashlib.sha256(), hashlib.sha256()
        with output_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._written = 0

    def write(self, chunk: Tensor) -> None:
        """The file's next bytes. One thread at a time, like `digest`, but the two may run side by side."""
        if not self._written:
            self._put(memoryview(self.plan.header))
        self._put(as_bytes(chunk))

    def digest(self, chunk: Tensor) -> None:
        """The same bytes once more, for the current tensor's digest; a chunk never spans two tensors."""
        data = as_bytes(chunk)
        assert len(data) <= self._left, f"{self.plan.path}: {self._sizes[len(self.tensors)][0]} overruns its plan"
        with self.clock("hash"):
            self._tensor.update(data)
        self._left -= len(data)
        if not self._left:
            self.tensors[self._sizes[len(self.tensors)][0]] = self._tensor.hexdigest()
            self._tensor = hashlib.sha256()
            if len(self.tensors) < len(self._sizes):
                self._left = self._sizes[len(self.tensors)][1]

    def _put(self, data: memoryview) -> None:
        with self.clock("write"), output_errors(self.path):
            write_all(self._handle, data)
            # What is on its way out by now need not be waited for when the file is sealed.
            hint(self._handle, self._written, len(data), "DONTNEED")
        self._written += len(data)
        with self.clock("hash"):
            self._file.update(data)

    def seal(self) -> dict[str, object]:
        """Bytes to the device, then the final name; the record for the journal."""
        assert len(self.tensors) == len(self._sizes), (
            f"{self.plan.path}: only {len(self.tensors)} of {len(self._sizes)} tensors"
        )
        with self.clock("sync"), output_errors(self.path):
            os.fsync(self._handle)
            os.close(self._handle)
            self._handle = -1
            self.draft.rename(self.path)
            sync_folder(self.path.parent)
        return {"size": self.plan.size, "sha256": self._file.hexdigest(), "tensors": self.tensors}

    def discard(self) -> None:
        """Forget an unfinished file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
            self.draft.unlink(missing_ok=True)
