"""A hub checkpoint as a source without a local copy: whole shards pass through a small part of the disk, in order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from convert.hub.stage import Stage, await_shard
from convert.readers.files import Files
from convert.readers.hub import HubHeaders
from convert.readers.source import LICENCE_GLOBS, SIDE_FILES, side_files
from specs.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor


class HubStream(HubHeaders):
    """Headers first, as for a plan; bytes once `stage` has said which jobs follow, each shard checked as a whole."""

    def __init__(self, repo: str, revision: str | None) -> None:
        super().__init__(repo, revision)
        self._folder: Path | None = None
        for name in self.files:
            if name in SIDE_FILES or any(fnmatch(name, glob) for glob in LICENCE_GLOBS):
                self.small(name)
        shards = sorted({t.file for t in self.tensors.values()})
        bare = [f for f in shards if self.listed[self._shard(f)].sha256 is None]
        if bare:
            raise SourceError([f"{f}: the hub lists no sha256 for it; leave --stream out" for f in bare])

    def _shard(self, file: str) -> str:
        return file.removeprefix(f"{self.identity.repo}/")

    def stage(self, jobs: Mapping[int, Collection[str]], folder: Path) -> Stage:
        """Jobs in their order, each with the tensors it reads -> what brings their shards into `folder`."""
        self._folder = folder
        needs = {job: {self._shard(self.tensors[n].file) for n in names} for job, names in jobs.items()}
        return Stage(str(self.identity.repo), str(self.identity.revision), self.listed, needs, folder)

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows low..high as flat uint8, once the shard is here; SourceError if it cannot be had."""
        assert self._folder is not None, "stage comes first"
        t = self.tensors[name]
        row = (t.stop - t.start) // max(1, t.shape[0]) if t.shape else t.stop - t.start
        path = await_shard(self._folder, self._shard(t.file))
        # Not kept open: a removed shard would keep its room.
        files = Files()
        try:
            return files.read(path, t.start + low * row, (high - low) * row, name)
        finally:
            files.close()

    def side_files(self) -> Iterator[Path]:
        return side_files(self.path)
