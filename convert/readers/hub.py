"""The Hugging Face hub as a source: a pinned commit, its headers by byte range, or the whole checkpoint on disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.readers.source import LICENCE_GLOBS, SIDE_FILES, Identity
from specs.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")


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


class HubHeaders:
    """A Source without bytes: config and safetensors headers of a hub checkpoint, read by byte range."""

    def __init__(self, repo: str, revision: str | None) -> None:
        from huggingface_hub import HfApi, hf_hub_download

        commit = pin(repo, revision)
        with hub_errors(repo, revision):
            found = HfApi().get_safetensors_metadata(repo, revision=commit)
            config = Path(hf_hub_download(repo, "config.json", revision=commit))
        self.path = config.parent
        self.config: Mapping[str, Any] = json.loads(config.read_bytes())
        self.header: dict[str, tuple[str, tuple[int, ...]]] = {}
        problems = []
        for file, metadata in found.files_metadata.items():
            for name, info in metadata.tensors.items():
                if name in self.header:
                    problems.append(f"{repo}: {name}: is in two files, the second is {file}")
                self.header[name] = (info.dtype, tuple(info.shape))
        if problems:
            raise SourceError(problems)
        self.identity = Identity(repo=repo, revision=commit)
        self.state = commit

    def rows(self, name: str, low: int, high: int) -> Tensor:
        raise SourceError(f"{name}: only headers were read from the hub; `kiln convert` downloads the checkpoint first")

    def leading(self, name: str) -> int:
        return 1

    def close(self) -> None:
        pass
