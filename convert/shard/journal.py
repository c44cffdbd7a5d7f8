"""What an interrupted conversion leaves behind, and how the next run goes on: one record per finished job."""

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from convert.shard.plan import Job
from convert.shard.writer import UNFINISHED, output_errors, write_file
from specs.errors import PlanError

FOLDER = ".convert"


class Journal:
    """The folder `.convert` inside an unfinished artifact. One conversion at a time holds its lock."""

    def __init__(self, out: Path, key: str) -> None:
        self.out, self.folder = out, out / FOLDER
        with output_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(self._lock)
            raise PlanError(f"{out}: another conversion is writing there; wait for it or choose another --out") from e
        self._claim(key)

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
        for stale in self.out.rglob(f"*{UNFINISHED}"):
            stale.unlink()

    def record(self, job: Job, facts: dict[str, Any]) -> None:
        raw = json.dumps(facts)
        write_file(self._path(job), f"{hashlib.sha256(raw.encode()).hexdigest()}\n{raw}".encode())

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
        """Gives the lock back; closing twice is fine."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """The artifact is sealed: nothing of the journal stays."""
        self.close()
        shutil.rmtree(self.folder)


def _record(path: Path) -> dict[str, Any] | None:
    """A record file's facts, or None if it is not as it was written."""
    digest, _, raw = path.read_bytes().partition(b"\n")
    if digest != hashlib.sha256(raw).hexdigest().encode():
        return None
    facts: dict[str, Any] = json.loads(raw)
    return facts
