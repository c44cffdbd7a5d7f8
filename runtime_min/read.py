"""Bytes of files straight into tensors: large sequential reads by several threads, copied on while the next are read.

On a CPU the kernel writes into the tensors themselves. For a GPU each thread owns two pinned buffers and a stream: one
buffer is filled while the other is on its way.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specs.errors import ArtifactError

BLOCK = 16 << 20
THREADS = 4
# The kernel takes at most 1024 destinations in one read.
MOST_PIECES = 512


@dataclass(frozen=True, slots=True)
class Span:
    """Where a contiguous tensor's bytes lie: `path`, from byte `start`."""

    path: Path
    start: int
    into: Tensor


@dataclass(frozen=True, slots=True)
class Phase:
    """What a part of loading took."""

    name: str
    nbytes: int
    seconds: float

    @property
    def gb_s(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return f"{self.name} {self.nbytes / 1e9:.2f} GB in {self.seconds:.2f} s ({self.gb_s:.2f} GB/s)"


@dataclass(frozen=True, slots=True)
class Block:
    """Up to BLOCK bytes in a row of one file, and the flat uint8 tensors that they fill one after another."""

    path: Path
    start: int
    pieces: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.pieces)


def fill(spans: Iterable[Span], device: torch.device, threads: int = THREADS) -> Phase:
    """Fills every span's tensor, all of which lie on `device`; returns when the bytes are there.

    Raises ArtifactError for a file that cannot be read or ends early.
    """
    begin, work = time.perf_counter(), blocks(spans)
    total = sum(b.size for b in work)
    with ExitStack() as opened:
        handles = {path: _open(path, opened) for path in dict.fromkeys(b.path for b in work)}
        queue = Queue(work, handles, ahead=2 * threads)
        with ThreadPoolExecutor(threads, "read") as pool:
            for done in [pool.submit(_reader, queue, device) for _ in range(min(threads, len(work)))]:
                done.result()
    return Phase("read", total, time.perf_counter() - begin)


def blocks(spans: Iterable[Span]) -> list[Block]:
    """The spans in file order, cut and joined into blocks."""
    out: list[Block] = []
    for path, found in groupby(sorted(spans, key=lambda s: (s.path, s.start)), key=lambda s: s.path):
        start = at = 0
        pieces: list[Tensor] = []
        for span in found:
            rest = span.into.view(-1).view(torch.uint8)
            if pieces and span.start != at:
                out.append(Block(path, start, tuple(pieces)))
                pieces = []
            start, at = (start, at) if pieces else (span.start, span.start)
            while rest.numel():
                piece, rest = rest[: BLOCK - (at - start)], rest[BLOCK - (at - start) :]
                pieces.append(piece)
                at += piece.numel()
                if at - start == BLOCK or len(pieces) == MOST_PIECES:
                    out.append(Block(path, start, tuple(pieces)))
                    pieces, start = [], at
        if pieces:
            out.append(Block(path, start, tuple(pieces)))
    return out


def _open(path: Path, opened: ExitStack) -> int:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as e:
        raise ArtifactError(f"{path}: cannot be read: {e.strerror}; fetch or convert again") from e
    opened.callback(os.close, handle)
    return handle


class Queue:
    """Blocks in order, to any thread; asks the kernel for the blocks `ahead` of the one it hands out."""

    def __init__(self, work: Sequence[Block], handles: dict[Path, int], ahead: int) -> None:
        self.work, self.handles, self.ahead = work, handles, ahead
        self._next = self._asked = 0
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[Block, int]]:
        while (taken := self._take()) is not None:
            yield taken

    def _take(self) -> tuple[Block, int] | None:
        with self._lock:
            if self._next >= len(self.work):
                return None
            block = self.work[self._next]
            self._next += 1
            wanted = self.work[self._asked : self._next + self.ahead]
            self._asked = max(self._asked, self._next + self.ahead)
        for soon in wanted:
            # Without this the kernel keeps a fraction of a megabyte under way.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.handles[soon.path], soon.start, soon.size, os.POSIX_FADV_WILLNEED)
        return block, self.handles[block.path]

    def stop(self) -> None:
        """Nothing more is handed out."""
        with self._lock:
            self._next = len(self.work)


class Sink(Protocol):
    """Takes blocks of one thread. `place` gives the memory to read a block into, `send` passes it on."""

    def place(self, block: Block) -> list[memoryview]: ...
    def send(self, block: Block) -> None: ...
    def close(self) -> None: ...


class Straight:
    """The tensors' own memory."""

    def place(self, block: Block) -> list[memoryview]:
        return [p.numpy().data for p in block.pieces]

    def send(self, block: Block) -> None:
        """Nothing: the bytes are where they belong."""

    def close(self) -> None:
        pass


class Pinned:
    """Two page-locked buffers that take turns, and a stream that empties them."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.buffers = [torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in self.buffers]  # type: ignore[no-untyped-call]
        self.turn = 0

    def place(self, block: Block) -> list[memoryview]:
        self.turn ^= 1
        self.copied[self.turn].synchronize()
        return [self.buffers[self.turn][: block.size].numpy().data]

    def send(self, block: Block) -> None:
        at, buffer = 0, self.buffers[self.turn]
        with torch.cuda.stream(self.stream):
            for piece in block.pieces:
                piece.copy_(buffer[at : at + piece.numel()], non_blocking=True)
                at += piece.numel()
        self.copied[self.turn].record(self.stream)

    def close(self) -> None:
        self.stream.synchronize()


def _reader(queue: Queue, device: torch.device) -> None:
    """One thread: blocks until there are no more; an error stops the other threads too."""
    try:
        sink: Sink = Straight() if device.type == "cpu" else Pinned(device)
        for block, handle in queue:
            _read(handle, block, sink.place(block))
            sink.send(block)
        sink.close()
    except BaseException:
        queue.stop()
        raise


def _read(handle: int, block: Block, views: list[memoryview]) -> None:
    at = block.start
    while views:
        try:
            got = os.preadv(handle, views, at)
        except OSError as e:
            raise ArtifactError(f"{block.path}: reading failed at byte {at}: {e.strerror}") from e
        if not got:
            # Which block past the end is read first is up to the threads; the end is the same for all.
            end = os.fstat(handle).st_size
            raise ArtifactError(f"{block.path}: ends at byte {end}, it was longer before; fetch or convert again")
        at += got
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if got:
            views[0] = views[0][got:]
