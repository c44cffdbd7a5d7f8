"""Shards of a hub checkpoint on their way through a small disk: whole, checked, ahead of their readers, then gone."""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from convert.hub.transfer import Place, download, stream
from convert.hub.tree import Remote
from convert.hub.wait import refusals
from specs.errors import InputError, SourceError

AHEAD = 2
CONNECTIONS = 8
PIECE = 32 << 20
POLL = 0.02
FAILED = "failed"


def ahead(place: Place, low: int, high: int) -> Iterator[bytes]:
    """Bytes low..high in order, over several connections; at most 8 pieces of 32 MiB in memory."""
    starts = deque(range(low, high, PIECE))
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(CONNECTIONS, "range") as pool:
        try:
            while starts or waiting:
                while starts and len(waiting) < CONNECTIONS:
                    at = starts.popleft()
                    waiting.append(pool.submit(_piece, place, at, min(at + PIECE, high)))
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _piece(place: Place, low: int, high: int) -> bytes:
    return b"".join(stream(place, low, high))


class Stopped(Exception):
    """The conversion ended before all its shards were here."""


class Stage:
    """Brings the shards that jobs need into `folder`, in the jobs' order, and removes each after its last job.

    A shard has its name only once its sha256 is the hub's, so readers of any process wait for the name. At any time
    those of the earliest unfinished job are there or on their way, and at most two that no finished job has read.
    """

    def __init__(
        self, repo: str, commit: str, listed: Mapping[str, Remote], needs: Mapping[int, Collection[str]], folder: Path
    ) -> None:
        self.repo, self.commit, self.listed, self.folder = repo, commit, listed, folder
        self.needs = {job: sorted(shards) for job, shards in needs.items()}
        self.order = list(dict.fromkeys(s for shards in self.needs.values() for s in shards))
        self._left = {s: sum(s in shards for shards in self.needs.values()) for s in self.order}
        self._used: set[str] = set()
        self._changed = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._bring, name="stage", daemon=True)

    @property
    def peak(self) -> int:
        """Bytes of disk that shards take at most while jobs finish in their order."""
        sizes = {s: self.listed[s].size for s in self.order}
        if not sizes:
            return 0
        jobs = list(self.needs.values())
        first = {s: next(i for i, shards in enumerate(jobs) if s in shards) for s in sizes}
        last = {s: max(i for i, shards in enumerate(jobs) if s in shards) for s in sizes}
        held = (sum(n for s, n in sizes.items() if first[s] <= i <= last[s]) for i in range(len(jobs)))
        return max(held) + AHEAD * max(sizes.values())

    def __enter__(self) -> Stage:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / FAILED).unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join()
        if error[0] is None:
            shutil.rmtree(self.folder)

    def finished(self, job: int) -> None:
        """The job reads no more."""
        with self._changed:
            for shard in self.needs.pop(job):
                self._left[shard] -= 1
                self._used.add(shard)
                if not self._left[shard]:
                    (self.folder / shard).unlink(missing_ok=True)
            self._changed.notify_all()

    def _bring(self) -> None:
        try:
            with refusals(self.repo):
                for i, shard in enumerate(self.order):
                    self._make_room(i)
                    listed, place = self.listed[shard], Place(self.repo, self.commit, shard)
                    assert listed.sha256 is not None
                    if not (self.folder / shard).exists():
                        download(place, self.folder / shard, listed.size, listed.sha256, self._check, ahead)
        except Stopped:
            pass
        except BaseException as e:
            told = e.lines() if isinstance(e, InputError) else [f"{self.repo}: {e!r}"]
            (self.folder / FAILED).write_text("\n".join(told))

    def _make_room(self, i: int) -> None:
        """Waits while the i-th shard is neither the earliest job's nor among the next two."""
        with self._changed:
            while not self._stop:
                needed = next(iter(self.needs.values()), [])
                beyond = [s for s in self.order[:i] if self._left[s] and s not in self._used and s not in needed]
                if self.order[i] in needed or len(beyond) < AHEAD:
                    return
                self._changed.wait()
        raise Stopped

    def _check(self, n: int) -> None:
        if self._stop:
            raise Stopped


def await_shard(folder: Path, name: str) -> Path:
    """The shard's path once it is there; SourceError with what kept it away."""
    path, failed = folder / name, folder / FAILED
    while not path.exists():
        if failed.exists():
            raise SourceError(failed.read_text().splitlines())
        time.sleep(POLL)
    return path
