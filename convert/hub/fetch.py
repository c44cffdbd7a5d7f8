"""From the hub, only what some ranks and one GPU architecture need; every byte is hashed before it gets its name."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from convert.hub.transfer import Place, download, stream
from convert.hub.tree import Local, Remote, Tree, commit_of, git_blob, tree
from convert.hub.wait import HubError, refusals
from convert.readers.sealed import DRAFTS, Sealed, read_draft, read_sealed
from convert.report import disk_problems
from convert.shard.journal import lock
from convert.shard.writer import write_file
from specs import manifest
from specs.errors import PlanError

FOLDER = ".fetch"
CONNECTIONS = 8
SHARED = ("", "weights/common", "vision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """ranks: none means all. arch: whose compiled kernels come along. drafts: by name, None means all there are."""

    repo: str
    revision: str | None = None
    ranks: tuple[int, ...] = ()
    arch: str | None = None
    drafts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What is now in `out`. already: bytes that were there before."""

    out: Path
    commit: str
    ranks: tuple[int, ...]
    drafts: tuple[str, ...]
    files: int
    nbytes: int
    already: int


Told = Callable[[int, int], None]


def fetch(wanted: Wanted, out: Path, progress: Told = lambda n, total: None) -> Fetched:
    """Brings `out` to hold the wanted part of a published artifact; running it again goes on, or adds ranks.

    progress(bytes that arrived, bytes in all). Raises HubError for what the hub has not, has unfinished or has
    damaged, PlanError if `out` holds something else or has no room.
    """
    with refusals(wanted.repo), _held(out):
        commit = commit_of(wanted.repo, wanted.revision)
        found = tree(wanted.repo, commit)
        papers = Papers(wanted.repo, commit, found)
        sealed = _begin(papers, "", out)
        ranks, drafts = _ranks(wanted, sealed), _drafts(wanted, found)
        files = _files(sealed, ranks, out)
        for folder in drafts:
            files |= _draft_files(papers, folder, sealed, ranks, out)
        if wanted.arch is not None:
            files |= _kernels(papers, wanted.arch, sealed, out)
        _compare(wanted.repo, files, out, found)
        total, here = sum(f.size for f in files.values()), [n for n, f in files.items() if _is_there(f)]
        already = sum(files[n].size for n in here)
        if problems := disk_problems(out, total - already):
            raise PlanError(problems)
        progress(already, total)
        missing = {n: f for n, f in files.items() if n not in here}
        _download(papers, missing, lambda n: progress(n, total))
        for name in found:
            if name.startswith("tuning/"):
                papers.read(name)
        papers.write(out)
    return Fetched(
        out=out,
        commit=commit,
        ranks=ranks,
        drafts=tuple(Path(d).name for d in drafts),
        files=len(files),
        nbytes=total,
        already=already,
    )


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """One fetch at a time in a folder that is new, empty, a fetch's or an artifact; PlanError otherwise."""
    state, finished = out / FOLDER, (out / manifest.NAME).exists()
    if out.exists() and any(out.iterdir()) and not finished and not state.is_dir():
        raise PlanError(f"{out}: is not empty and no unfinished fetch; choose another --out or empty it")
    state.mkdir(parents=True, exist_ok=True)
    handle = lock(state / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    if handle is None:
        raise PlanError(f"{out}: another fetch is writing there; wait for it or choose another --out")
    try:
        yield
        shutil.rmtree(state)
    finally:
        os.close(handle)


class Papers:
    """Small files of a commit, held against the digests that the hub lists, and kept until they are written."""

    def __init__(self, repo: str, commit: str, found: Tree) -> None:
        self.repo, self.commit, self.found = repo, commit, found
        self.data: dict[str, bytes] = {}

    def read(self, name: str) -> bytes:
        """All of a file; HubError if it is not what is listed, even when it is read again."""
        listed, place = self.found[name], Place(self.repo, self.commit, name)
        for _ in range(2):
            data = b"".join(stream(place, 0, listed.size))
            if _digest(data, listed) == (listed.sha256 or listed.blob):
                self.data[name] = data
                return data
        raise HubError(f"{place}: digest {_digest(data, listed)}, expected {listed.sha256 or listed.blob}")

    def write(self, out: Path) -> None:
        """All that was read, the manifest last: it makes the folder an artifact."""
        for name in sorted(self.data, key=lambda n: (n == manifest.NAME, n)):
            write_file(out / name, self.data[name])


def _digest(data: bytes, listed: Remote) -> str:
    return hashlib.sha256(data).hexdigest() if listed.sha256 is not None else git_blob(data)


def _begin(papers: Papers, folder: str, out: Path) -> Sealed:
    """The manifest in a folder of the repository, read strictly, and the same as `out` was begun with."""
    name = f"{folder}{manifest.NAME}"
    if name not in papers.found:
        raise HubError(f"{papers.repo}: has no {name}, so it is no artifact or not published to its end")
    data = papers.read(name)
    for earlier in (out / name, out / FOLDER / name):
        if earlier.exists() and earlier.read_bytes() != data:
            raise PlanError(f"{out / folder}: holds a part of another artifact; choose another --out or delete it")
    write_file(out / FOLDER / name, data)
    return read_sealed((out / FOLDER / name).parent)


def _drafts(wanted: Wanted, found: Tree) -> list[str]:
    """`draft/NAME/` of each draft that is wanted; HubError for one that is not there."""
    there = sorted(n.split("/")[1] for n in found if PurePosixPath(n).match(f"{DRAFTS}/*/{manifest.NAME}"))
    if missing := sorted(set(wanted.drafts or ()) - set(there)):
        raise HubError(f"{wanted.repo}: has no draft {', '.join(missing)}; it has {', '.join(there) or 'none'}")
    return [f"{DRAFTS}/{n}/" for n in there if wanted.drafts is None or n in wanted.drafts]


def _draft_files(papers: Papers, folder: str, target: Sealed, ranks: tuple[int, ...], out: Path) -> dict[str, Local]:
    """What a draft's manifest lists for these ranks, if it is bound to this artifact."""
    own = read_draft(_begin(papers, folder, out).path, target)
    return {f"{folder}{n}": f for n, f in _files(own, ranks, out / folder).items()}


def _ranks(wanted: Wanted, sealed: Sealed) -> tuple[int, ...]:
    world = sealed.mesh.world
    if wrong := sorted(r for r in wanted.ranks if not 0 <= r < world):
        raise HubError(f"{wanted.repo}: has ranks 0..{world - 1} ({sealed.mesh}), {wrong} were asked for")
    return tuple(sorted(set(wanted.ranks))) or tuple(range(world))


def _files(sealed: Sealed, ranks: tuple[int, ...], out: Path) -> dict[str, Local]:
    """What the manifest lists for these ranks."""
    folders = {*SHARED, *(f"weights/rank-{r:02d}" for r in ranks)}
    chosen = {n: f for n, f in sealed.files.items() if n.rpartition("/")[0] in folders}
    return {n: Local(out / n, size, digest) for n, (size, digest) in chosen.items()}


def _kernels(papers: Papers, arch: str, sealed: Sealed, out: Path) -> dict[str, Local]:
    """The cubins for an architecture, bound to these weights."""
    folder, found = f"kernels/{arch}", papers.found
    if f"{folder}/index.json" not in found:
        others = sorted(n.split("/")[1] for n in found if n.startswith("kernels/") and n.endswith("/index.json"))
        raise HubError(
            f"{papers.repo}: has no kernels for {arch} (it has {', '.join(others) or 'none'}); leave --arch out and "
            f"run `kiln-run compile {out} --arch {arch}`"
        )
    index = _object(papers.read(f"{folder}/index.json"))
    rows = index.get("kernels")
    if index.get("weights") != sealed.manifest["digest"] or not isinstance(rows, list):
        raise HubError(f"{papers.repo}/{folder}: was compiled for other weights; leave --arch out and compile anew")
    files = {}
    for row in rows:
        name = f"{folder}/{row.get('file')}"
        if name not in found or row["file"] != Path(row["file"]).name:
            raise HubError(f"{papers.repo}/{name}: listed by {folder}/index.json but not there")
        files[name] = Local(out / name, found[name].size, row["sha256"])
    return files


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _compare(repo: str, files: Mapping[str, Local], out: Path, found: Tree) -> None:
    """HubError before anything is downloaded if the hub has another file than the artifact lists."""
    problems = []
    for name, local in sorted(files.items()):
        remote = found.get(name)
        if remote is None:
            problems.append(f"{repo}/{name}: not there; publish the artifact again")
        elif remote.size != local.size or (remote.sha256 or local.sha256) != local.sha256:
            problems.append(
                f"{repo}/{name}: {remote.size} bytes, sha256 {remote.sha256}; expected {local.size} bytes, sha256 "
                f"{local.sha256}; publish the artifact again"
            )
    if problems:
        raise HubError(problems)


def _is_there(file: Local) -> bool:
    """Whatever has its name was hashed before it got it."""
    return file.path.is_file() and file.path.stat().st_size == file.size


def _download(papers: Papers, files: Mapping[str, Local], progress: Callable[[int], None]) -> None:
    """Eight files at a time. Damaged ones are named together; any other error ends it at once."""
    problems: list[str] = []

    def one(name: str) -> None:
        try:
            file = files[name]
            download(Place(papers.repo, papers.commit, name), file.path, file.size, file.sha256, progress)
        except HubError as e:
            problems.extend(e.problems)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        waiting = [pool.submit(one, name) for name in sorted(files)]
        try:
            for future in waiting:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    if problems:
        raise HubError(sorted(problems))
