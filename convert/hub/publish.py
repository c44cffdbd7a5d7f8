"""An artifact to the hub: one commit a folder, the manifest last, then the hub's own digests against the manifest."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convert.hub.bundle import OWNED, Bundle, bundle, is_seal
from convert.hub.tree import Local, Tree, commit_of, differences, same, tree
from convert.hub.wait import HubError, patiently, refusals
from specs import manifest
from specs.errors import ArtifactError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

log = logging.getLogger(__name__)

HASHERS = 8
BRANCH = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What happened. missing: commit label -> bytes that were (or, dry, would be) sent. commit None: dry run."""

    repo: str
    missing: dict[str, int]
    files: int
    nbytes: int
    commit: str | None
    tag: str | None
    warnings: tuple[str, ...]


def publish(
    artifact: Path,
    repo: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    tag: str | None = None,
    progress: Callable[[int], None] = lambda n: None,
) -> Published:
    """Sends what the hub does not have yet, and proves that it then holds the artifact.

    Raises ArtifactError for an artifact that may not be published, HubError for a repository that holds another one,
    for a hub that refuses, and if the repository differs from the manifest at the end. Running it again goes on.
    """
    ready = bundle(artifact)
    with refusals(repo):
        found = _found(repo)
        _refuse_another(repo, ready, found)
        _refuse_tag(repo, tag)
        missing = {label: _missing(files, found) for label, files in ready.commits.items()}
        commit = None
        if not dry_run:
            _create(repo, private)
            for label, files in ready.commits.items():
                _send(repo, label, files, progress)
            commit = _proven(repo, ready)
            if tag is not None:
                _tag(repo, tag, commit)
    return Published(
        repo=repo,
        missing={label: sum(f.size for f in files.values()) for label, files in missing.items() if files},
        files=len(ready.files),
        nbytes=sum(f.size for f in ready.files.values()),
        commit=commit,
        tag=tag,
        warnings=ready.warnings,
    )


def _found(repo: str) -> Tree:
    """The repository's files, none if there is no repository yet."""
    from huggingface_hub import errors

    try:
        return tree(repo, BRANCH)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        return {}


def _missing(files: Mapping[str, Local], found: Tree) -> dict[str, Local]:
    return {name: f for name, f in files.items() if not same(f, found.get(name))}


def _refuse_another(repo: str, ready: Bundle, found: Tree) -> None:
    """HubError if the repository is another artifact's, finished or not, or has another draft of the same name."""
    if manifest.NAME in found and not same(ready.files[manifest.NAME], found[manifest.NAME]):
        raise HubError(f"{repo}: holds another finished artifact; choose another repository or delete that one")
    for name in filter(is_seal, ready.files):
        if name in found and not same(ready.files[name], found[name]):
            draft = name.removesuffix(f"/{manifest.NAME}")
            raise HubError(f"{repo}/{draft}: is another draft of that name; add yours under another")
    foreign = sorted(n for n in found if n.startswith(OWNED) and n not in ready.files)
    if foreign:
        raise HubError([f"{repo}/{n}: belongs to another artifact; choose another repository" for n in foreign])


def _refuse_tag(repo: str, tag: str | None) -> None:
    """HubError if the tag is taken; whether by this very commit is asked once the commit is known."""
    taken = _tags(repo).get(tag) if tag is not None else None
    if taken is not None and taken != commit_of(repo, BRANCH):
        raise HubError(f"{repo}: tag {tag} is at commit {taken} already; choose another")


def _tags(repo: str) -> dict[str | None, str]:
    from huggingface_hub import HfApi, errors

    try:
        refs = patiently(lambda: HfApi().list_repo_refs(repo), f"{repo}: reading tags")
    except errors.RepositoryNotFoundError:
        return {}
    return {t.name: t.target_commit for t in refs.tags}


def _create(repo: str, private: bool) -> None:
    from huggingface_hub import HfApi

    patiently(lambda: HfApi().create_repo(repo, private=private, exist_ok=True), f"{repo}: creating")
    if private and not patiently(lambda: HfApi().model_info(repo).private, f"{repo}: reading"):
        raise HubError(f"{repo}: is public already; make it private on the hub, or leave --private out")


def _send(repo: str, label: str, files: Mapping[str, Local], progress: Callable[[int], None]) -> None:
    """One commit with what is missing. Asked anew each time: a commit may have arrived whose answer was lost."""
    additions: dict[str, CommitOperationAdd] = {}

    def attempt() -> None:
        missing = _missing(files, tree(repo, BRANCH))
        if not additions:
            additions.update(_additions(missing))
        if missing:
            log.info("%s: %s: %d files", repo, label, len(missing))
            _commit(repo, label, [additions[n] for n in missing])

    patiently(attempt, f"{repo}: {label}")
    progress(sum(f.size for f in files.values()))


def _commit(repo: str, label: str, additions: "list[CommitOperationAdd]") -> None:
    from huggingface_hub import HfApi, errors

    try:
        HfApi().create_commit(repo, additions, commit_message=f"Add {label}")
    except RuntimeError as e:
        # What the client makes of an upload's error: HTTP is behind it, or nothing that is known here.
        if isinstance(e.__cause__, errors.HTTPError):  # type: ignore[attr-defined]
            raise e.__cause__ from e
        raise HubError(
            f"{repo}: {label}: sending failed: {e}; run the same command again, it goes on from there"
        ) from e


def _additions(files: Mapping[str, Local]) -> "dict[str, CommitOperationAdd]":
    """Upload operations, each hashed once and held against the seal; ArtifactError names what does not fit."""
    from huggingface_hub import CommitOperationAdd

    def one(name: str) -> "CommitOperationAdd":
        operation = CommitOperationAdd(name, str(files[name].path))
        found, want = operation.upload_info.sha256.hex(), files[name].sha256
        if found != want:
            raise ArtifactError(f"{files[name].path}: sha256 {found}, expected {want}; convert or fetch it again")
        return operation

    with ThreadPoolExecutor(HASHERS) as pool:
        return dict(zip(files, pool.map(one, files), strict=True))


def _proven(repo: str, ready: Bundle) -> str:
    """The commit at which the hub's sizes and digests are the artifact's."""
    commit = commit_of(repo, BRANCH)
    problems = differences(repo, ready.files, tree(repo, commit), OWNED)
    if problems:
        raise HubError([*problems, f"{repo}: differs from the artifact; run the same command again"])
    return commit


def _tag(repo: str, tag: str, commit: str) -> None:
    from huggingface_hub import HfApi

    if _tags(repo).get(tag) == commit:
        return
    patiently(lambda: HfApi().create_tag(repo, tag=tag, revision=commit, exist_ok=True), f"{repo}: tagging")
    if (at := _tags(repo).get(tag)) != commit:
        raise HubError(f"{repo}: tag {tag} is at {at}, not at {commit}; choose another")
