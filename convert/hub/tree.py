"""What a repository holds: sizes and digests by path, as the hub lists them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from convert.hub.wait import HubError, patiently


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on the hub. sha256 of what is stored as LFS, else the git blob's sha1."""

    size: int
    sha256: str | None
    blob: str


@dataclass(frozen=True, slots=True)
class Local:
    """A file of an artifact and what its seal says of it."""

    path: Path
    size: int
    sha256: str


Tree = dict[str, Remote]


def tree(repo: str, revision: str) -> Tree:
    """path -> file of a revision."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def listed() -> Tree:
        found = HfApi().list_repo_tree(repo, recursive=True, revision=revision)
        files = [f for f in found if isinstance(f, RepoFile)]
        return {f.path: Remote(f.size, f.lfs.sha256 if f.lfs is not None else None, f.blob_id) for f in files}

    return patiently(listed, f"{repo}: listing")


def same(local: Local, remote: Remote | None) -> bool:
    """Whether the hub holds these very bytes. Of a file that is no LFS object the local one is read."""
    if remote is None or remote.size != local.size:
        return False
    if remote.sha256 is not None:
        return remote.sha256 == local.sha256
    return remote.blob == git_blob(local.path.read_bytes())


def git_blob(data: bytes) -> str:
    """The name git gives to a file's contents."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def differences(repo: str, files: Mapping[str, Local], found: Tree, folders: tuple[str, ...]) -> list[str]:
    """How a repository differs from an artifact: what is missing, what is other, and in `folders` what is too much."""
    problems = []
    for path, local in sorted(files.items()):
        remote = found.get(path)
        if remote is None:
            problems.append(f"{repo}/{path}: not there, expected {local.size} bytes")
        elif not same(local, remote):
            told = f"sha256 {remote.sha256}" if remote.sha256 is not None else f"blob {remote.blob}"
            problems.append(
                f"{repo}/{path}: {remote.size} bytes, {told}; expected {local.size} bytes, sha256 {local.sha256}"
            )
    extra = sorted(p for p in found if p not in files and p.startswith(folders))
    return [*problems, *(f"{repo}/{p}: belongs to no file of this artifact" for p in extra)]


def commit_of(repo: str, revision: str | None) -> str:
    """The commit behind a branch or tag."""
    from huggingface_hub import HfApi

    sha = patiently(lambda: HfApi().model_info(repo, revision=revision).sha, f"{repo}: reading")
    if sha is None:
        raise HubError(f"{repo}: the hub names no commit; is it empty?")
    return sha
