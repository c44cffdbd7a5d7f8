"""The Hugging Face hub as a source: a pinned commit, its headers by byte range, or the whole checkpoint on disk."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.hub.tree import Remote
from convert.hub.wait import patiently
from convert.readers.join import INDEX, file_problems, join, weight_map
from convert.readers.safetensors_dir import read_object
from convert.readers.safetensors_file import header_length, parse_header
from convert.readers.source import LICENCE_GLOBS, SIDE_FILES, Identity, TensorInfo
from specs.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

    from convert.hub.stage import Stage

HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")

FIRST = 100_000
CONNECTIONS = 8
TIMEOUT = 60.0


def parse_id(text: str) -> tuple[str, str | None] | None:
    """("owner/name", revision or None), or None if the text is no hub id."""
    match = HUB_ID.fullmatch(text)
    return None if match is None else (match["repo"], match["revision"])


@contextmanager
def hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """The hub's refusals in plain words: gated, missing, unreachable."""
    from huggingface_hub import errors

    where = repo + (f"@{revision}" if revision else "")
    try:
        yield
    except errors.GatedRepoError as e:
        raise SourceError(f"{where}: gated; accept its terms on the hub and log in with `hf auth login`") from e
    except errors.RepositoryNotFoundError as e:
        raise SourceError(
            f"{where}: no such repository, or your token may not see it; check the name, `hf auth login`"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise SourceError(f"{where}: the repository has no such revision") from e
    # The HTTP library behind the client changes its name between versions; its errors are found here under one.
    except (errors.HTTPError, OSError) as e:  # type: ignore[attr-defined]
        raise SourceError(
            f"{where}: the hub could not be read: {str(e).splitlines()[0]}; is that a folder you meant?"
        ) from e


def pin(repo: str, revision: str | None) -> str:
    """The commit hash behind a branch, tag or None."""
    from huggingface_hub import HfApi

    with hub_errors(repo, revision):
        sha = HfApi().model_info(repo, revision=revision).sha
    if sha is None:
        raise SourceError(f"{repo}: the hub names no commit")
    return sha


def download(repo: str, revision: str | None) -> Path:
    """The checkpoint in the local hub cache, complete, at a pinned commit."""
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.safetensors.index.json", *SIDE_FILES, *LICENCE_GLOBS]
    commit = pin(repo, revision)
    with hub_errors(repo, revision):
        return Path(snapshot_download(repo, revision=commit, allow_patterns=patterns))


def fetch(repo: str, commit: str, name: str, low: int, high: int) -> bytes:
    """Bytes low..high of a hub file; SourceError if the server would send more than was asked for."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    url = hf_hub_url(repo, name, revision=commit)
    headers = {**build_hf_headers(), "Range": f"bytes={low}-{high - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            raise SourceError(
                f"{repo}: {name}: the server ignores byte ranges; download the checkpoint and name its folder"
            )
        data = b"".join(response.iter_bytes())
    if len(data) != high - low:
        raise SourceError(f"{repo}: {name}: asked for {high - low} bytes at {low}, received {len(data)}; try again")
    return data


def fetch_header(repo: str, commit: str, name: str, size: int) -> tuple[dict[str, TensorInfo], int, str]:
    """One file's tensors, as strictly read as from a disk, the bytes that were fetched, and the header's sha256."""
    where = f"{repo}/{name}"
    head = fetch(repo, commit, name, 0, min(FIRST, size)) if size else b""
    stop = 8 + header_length(where, head[:8], size)
    if stop > len(head):
        head += fetch(repo, commit, name, len(head), stop)
    return parse_header(where, head[8:stop], size)[0], len(head), hashlib.sha256(head[8:stop]).hexdigest()


class HubHeaders:
    """A Source without bytes: config, index and safetensors headers of a hub checkpoint, read by byte range.

    files: every file of the repository with its size. fetched: bytes read of safetensors files.
    """

    def __init__(self, repo: str, revision: str | None) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        commit = pin(repo, revision)
        with hub_errors(repo, revision):
            listed = list(HfApi().list_repo_tree(repo, revision=commit))
        self.listed = {
            f.path: Remote(f.size, f.lfs.sha256 if f.lfs is not None else None, f.blob_id)
            for f in listed
            if isinstance(f, RepoFile)
        }
        self.files: dict[str, int] = {name: f.size for name, f in self.listed.items()}
        self.identity = Identity(repo=repo, revision=commit)
        self.state = commit
        self.logical: Mapping[str, str] | None = None
        config = self.small("config.json")
        self.path = config.parent
        self.config: Mapping[str, Any] = read_object(config)
        self.fetched = 0
        self.tensors = self._tensors(repo, commit)
        self.header = {name: (t.dtype, t.shape) for name, t in self.tensors.items()}

    def small(self, name: str) -> Path:
        """A small file of the pinned commit, in the local hub cache."""
        from huggingface_hub import hf_hub_download

        repo, commit = str(self.identity.repo), self.identity.revision
        if name not in self.files:
            raise SourceError(f"{repo}: has no {name}; is this a model checkpoint?")
        with hub_errors(repo, commit):
            return Path(hf_hub_download(repo, name, revision=commit))

    def _tensors(self, repo: str, commit: str) -> dict[str, TensorInfo]:
        weights = {n: s for n, s in self.files.items() if n.endswith(".safetensors")}
        mapped = weight_map(f"{repo}/{INDEX}", read_object(self.small(INDEX))) if INDEX in self.files else {}
        problems = list(file_problems(repo, mapped, weights))
        if not weights:
            problems.append(f"{repo}: no *.safetensors files; expected a checkpoint")
        headers: dict[str, dict[str, TensorInfo]] = {}
        digests: dict[str, str] = {}

        def read(name: str) -> None:
            try:
                with hub_errors(repo, commit):
                    found = patiently(lambda: fetch_header(repo, commit, name, weights[name]), f"{repo}/{name}")
                headers[name], fetched, digests[name] = found
                self.fetched += fetched
            except SourceError as e:
                problems.extend(e.problems)

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(read, sorted(weights)))
        tensors, differences = join(headers, mapped)
        if problems or differences:
            raise SourceError([*sorted(set(problems)), *differences])
        records = ({"name": n, "size": weights[n], "header_sha256": digests[n]} for n in sorted(weights))
        self.identity = Identity(repo=repo, revision=commit, files=tuple(records))
        return tensors

    def rows(self, name: str, low: int, high: int) -> Tensor:
        raise SourceError(f"{name}: only headers were read from the hub; `kiln convert` downloads the checkpoint first")

    def soon(self, name: str, low: int, high: int) -> None:
        """Nothing: there are no bytes to wait for."""

    def stage(self, jobs: Mapping[int, Collection[str]], folder: Path) -> Stage | None:
        """Nothing: nothing can be read."""
        return None

    def leading(self, name: str) -> int:
        return 1

    def side_files(self) -> Iterator[Path]:
        return iter(())

    def close(self) -> None:
        pass
