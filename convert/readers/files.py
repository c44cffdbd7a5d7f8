"""Open files read by position, from any thread."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from specs.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; bf16 has to be viewed as int16 or uint8 first."""
    return tensor.numpy().data.cast("B")


def hint(handle: int, start: int, size: int, advice: str) -> None:
    """Tells the kernel what will become of bytes of an open file: WILLNEED begins to read them, DONTNEED to write them
    out. It waits for nothing, and where the system has no such call, or refuses, nothing happens."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(handle, start, size, getattr(os, f"POSIX_FADV_{advice}"))


class Files:
    """Keeps files open; `read` fills a fresh uint8 tensor with exactly the bytes asked for."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Files], tuple[()]]:
        """Another process opens its own."""
        return Files, ()

    def read(self, path: Path, start: int, size: int, what: str) -> Tensor:
        """Bytes start..start+size; SourceError names `what` if the file cannot give them."""
        # Here and not above: plans read headers only and never wait for torch.
        import torch

        out = torch.empty(size, dtype=torch.uint8)
        view, done = as_bytes(out), 0
        try:
            handle = self._open(path)
            while done < size:
                got = os.preadv(handle, [view[done:]], start + done)
                if not got:
                    raise SourceError(
                        f"{path}: {what}: the file ends at byte {start + done}; it changed while being read"
                    )
                done += got
        except OSError as e:
            raise SourceError(f"{path}: {what}: reading failed at byte {start + done}: {e.strerror}") from e
        return out

    def soon(self, path: Path, start: int, size: int) -> None:
        """Asks the kernel to fetch bytes that `read` will want; a file that cannot be opened is `read`'s to report."""
        with suppress(OSError):
            hint(self._open(path), start, size, "WILLNEED")

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._handles:
                self._handles[path] = os.open(path, os.O_RDONLY)
            return self._handles[path]

    def close(self) -> None:
        with self._lock:
            for handle in self._handles.values():
                os.close(handle)
            self._handles.clear()
