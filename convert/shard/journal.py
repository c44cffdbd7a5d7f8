"""What an interrupted conversion leaves behind, and how the next run goes on: one record per finished job."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convert.shard.plan import Job
from convert.shard.writer import UNFINISHED, output_errors, write_file
from specs import manifest
from specs.errors import OutputError, PlanError

FOLDER = ".convert"


def lock(path: Path, how: int) -> int | None:
    """A lock on a file, held until the handle is closed or the process ends; None if another process has it."""
    with output_errors(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError as e:
        os.close(handle)
        raise OutputError(
            f"{path}: the file system has no locks ({e.strerror}); mount it with them, or choose another --out"
        ) from e
    return handle


class Journal:
    """The folder `.convert` inside an unfinished artifact.

    One conversion at a time holds its lock, or several `shared` ones do, each of which then locks the jobs it takes.
    """

    def __init__(self, out: Path, key: str, shared: bool = False) -> None:
        self.out, self.folder, self.shared = out, out / FOLDER, shared
        self._taken: dict[int, int] = {}
        with output_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.folder / "lock", (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if self._lock is None:
            raise PlanError(f"{out}: another conversion is writing there; wait for it or choose another --out")
        self._claim(key)

    @classmethod
    def attached(cls, out: Path, shared: bool) -> Journal:
        """For a further process of a conversion that holds the lock."""
        self = cls.__new__(cls)
        self.out, self.folder, self.shared, self._taken, self._lock = out, out / FOLDER, shared, {}, None
        return self

    def __reduce__(self) -> tuple[Any, tuple[Path, bool]]:
        return Journal.attached, (self.out, self.shared)

    def _claim(self, key: str) -> None:
        path = self.folder / "key"
        if path.exists() and path.read_bytes() != key.encode():
            self.close()
            raise PlanError(
                f"{self.out}: holds an unfinished conversion of another source, mesh or version; "
                "delete that folder, or choose another --out"
            )
        if not path.exists():
            write_file(path, key.encode())
        if not self.shared:
            self.sweep()

    def sweep(self) -> None:
        """Removes what killed writers left; only while nobody else writes."""
        for stale in self.out.rglob(f"*{UNFINISHED}"):
            stale.unlink()

    def take(self, job: Job) -> bool:
        """Whether the job is this process's to do: neither finished nor in another's hands."""
        if not self.shared:
            return True
        if (handle := self._inside(f"job-{job.number:03d}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
            return False
        # Whoever sealed clears the records away; the manifest was there before they went.
        if self.finished(job) is not None or (self.out / manifest.NAME).exists():
            os.close(handle)
            return False
        for file in job.files.values():
            for stale in (self.out / file.path).parent.glob(f"{Path(file.path).name}.*{UNFINISHED}"):
                stale.unlink()
        self._taken[job.number] = handle
        return True

    def record(self, job: Job, facts: dict[str, Any]) -> None:
        """The job is finished, and nobody's any more."""
        raw = json.dumps(facts)
        write_file(self._path(job), f"{hashlib.sha256(raw.encode()).hexdigest()}\n{raw}".encode())
        if self.shared:
            os.close(self._taken.pop(job.number))

    @contextmanager
    def sealing(self) -> Iterator[None]:
        """One process at a time; the last one finds every job finished, or the artifact already sealed."""
        handle = self._inside("seal", fcntl.LOCK_EX) if self.shared else None
        try:
            yield
        finally:
            if handle is not None:
                os.close(handle)

    def _inside(self, name: str, how: int) -> int | None:
        """A lock in the folder; None if another process has it, or has sealed the artifact and removed the folder."""
        try:
            return lock(self.folder / name, how)
        except OutputError:
            if self.folder.is_dir():
                raise
            return None

    def finished(self, job: Job) -> dict[str, Any] | None:
        """The record of a job whose files are all there at their full size, else None: the job is done again.

        A record that is not whole counts as none.
        """
        path = self._path(job)
        if not path.exists():
            return None
        facts = _record(path)
        if facts is None or set(facts["files"]) != {f.path for f in job.files.values()}:
            return None
        for name, file in facts["files"].items():
            target = self.out / name
            if not target.is_file() or target.stat().st_size != file["size"]:
                return None
        return facts

    def forget(self) -> None:
        """No job counts as finished any more."""
        for path in self.folder.glob("job-*.json"):
            path.unlink()

    def _path(self, job: Job) -> Path:
        return self.folder / f"job-{job.number:03d}.json"

    def close(self) -> None:
        """Gives every lock back; closing twice is fine."""
        handles = [*self._taken.values(), *([] if self._lock is None else [self._lock])]
        self._lock, self._taken = None, {}
        for handle in handles:
            os.close(handle)

    def remove(self) -> None:
        """The artifact is sealed: nothing of the journal stays."""
        self.close()
        # Others may still be looking at it; whoever comes next clears what is left.
        shutil.rmtree(self.folder, ignore_errors=self.shared)


def _record(path: Path) -> dict[str, Any] | None:
    """A record file's facts, or None if it is not as it was written."""
    digest, _, raw = path.read_bytes().partition(b"\n")
    if digest != hashlib.sha256(raw).hexdigest().encode():
        return None
    facts: dict[str, Any] = json.loads(raw)
    return facts
