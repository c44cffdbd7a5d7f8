"""What the converter reads from: headers first, bytes on request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from convert.hub.stage import Stage

# Files of a checkpoint that an artifact carries along, byte for byte. Remote code (*.py) never is.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
LICENCE_GLOBS = ("LICENSE*", "LICENCE*", "NOTICE*", "THIRD_PARTY_NOTICES*")
TOKENIZER_FILES = ("tiktoken.model", "tokenizer.json")


class TensorInfo(NamedTuple):
    """One tensor as a header describes it; start and stop are byte positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Where a checkpoint came from, as far as it is known; part of the artifact's manifest."""

    repo: str | None = None
    revision: str | None = None
    files: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    def record(self) -> dict[str, Any]:
        return {"repo": self.repo, "revision": self.revision, "files": list(self.files)}


class Source(Protocol):
    """A checkpoint: a folder of safetensors files, or an artifact, which is the same tensors in another form."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Parsed config.json."""
        ...

    @property
    def header(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """name -> (dtype, shape) of every tensor."""
        ...

    @property
    def identity(self) -> Identity: ...

    @property
    def state(self) -> str:
        """Changes when the files change; decides whether an interrupted conversion may go on."""
        ...

    @property
    def logical(self) -> Mapping[str, str] | None:
        """Logical digest by part where it is sealed beforehand, else None; what is read must come to the same."""
        ...

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows low..high of the tensor's first axis, as flat uint8 in the checkpoint's byte order."""
        ...

    def soon(self, name: str, low: int, high: int) -> None:
        """A hint that `rows` with the same arguments follows."""
        ...

    def stage(self, jobs: Mapping[int, Collection[str]], folder: Path) -> Stage | None:
        """What brings the bytes here that `jobs`, in this order, read by tensor; None where they are here already."""
        ...

    def leading(self, name: str) -> int:
        """`rows` takes multiples of this many rows."""
        ...

    def side_files(self) -> Iterator[Path]:
        """The files beside the weights that an artifact takes along."""
        ...

    def close(self) -> None: ...


def side_files(folder: Path) -> Iterator[Path]:
    """The files of a checkpoint folder that an artifact takes along."""
    for name in SIDE_FILES:
        if (folder / name).is_file():
            yield folder / name
    found = {p for glob in LICENCE_GLOBS for p in folder.glob(glob) if p.is_file()}
    yield from sorted(found)
