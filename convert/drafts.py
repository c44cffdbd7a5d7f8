"""Drafts of an artifact: each a small one in draft/NAME, cut for the same mesh and bound to the target's digest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from convert.readers.find import find
from convert.readers.sealed import DRAFTS, drafts, read_sealed
from convert.readers.source import LICENCE_GLOBS, Source
from convert.report import Report
from convert.shard.plan import Plan, plan
from specs import manifest
from specs.config import read_config
from specs.dims import ModelConfig
from specs.draft import DraftConfig, check_partner, read_draft_config
from specs.errors import ConfigError, InputError
from specs.mesh import Mesh
from specs.schema import load

if TYPE_CHECKING:
    from convert.pipeline import Part

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A draft as it was asked for: a folder, an artifact's draft folder or a hub id, and what it shall be called."""

    model: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft that fits its target and mesh. said: what it does with this target, a line each."""

    name: str
    source: Source
    plan: Plan
    said: tuple[str, ...]


def asked(text: str) -> Asked:
    """`PATH` or `PATH=NAME`; the name is the folder's own unless given. ConfigError for what is no name."""
    model, equals, name = text.rpartition("=")
    if not equals or Path(text).exists():
        model, name = text, Path(text.split("@")[0]).name
    if not NAME.fullmatch(name):
        raise ConfigError(f"--draft {text}: {name!r} is no name for a draft (letters, digits, . _ -); say PATH=NAME")
    return Asked(model=model, name=name)


def all_asked(texts: Sequence[str], model: str | None = None) -> list[Asked]:
    """What was asked for, and the drafts that MODEL has if it is an artifact; ConfigError for a name used twice."""
    own = drafts(Path(model)) if model is not None else []
    found = [*map(asked, texts), *(Asked(model=str(p), name=p.name) for p in own)]
    names = [a.name for a in found]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ConfigError([f"draft {n}: the name is used twice; say PATH=NAME with another" for n in twice])
    return found


class Target(Protocol):
    """What a draft must fit: a plan, or a finished artifact."""

    @property
    def config(self) -> ModelConfig | DraftConfig: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The target in an artifact's folder."""

    config: ModelConfig
    mesh: Mesh
    ranks: tuple[int, ...]


def finished(artifact: Path) -> Finished:
    sealed = read_sealed(artifact)
    config = read_config(manifest.read_json(artifact / "config.json"))
    return Finished(config=config, mesh=sealed.mesh, ranks=sealed.ranks)


def prepared(wanted: Sequence[Asked], target: Target, headers_only: bool = False) -> list[Draft]:
    """Every draft, planned; an InputError names the draft and all that keeps it from this target or mesh."""
    assert isinstance(target.config, ModelConfig)
    return [_prepared(a, target.config, target.mesh, target.ranks, headers_only) for a in wanted]


def _prepared(a: Asked, target: ModelConfig, mesh: Mesh, ranks: tuple[int, ...], headers_only: bool) -> Draft:
    if not headers_only and not Path(a.model).exists():
        # What headers tell is told before anything is downloaded.
        _prepared(a, target, mesh, ranks, True)
    try:
        source = find(a.model, headers_only=headers_only)
        config = read_draft_config(source.config, target.text.layers)
        made = plan(load(config.kind), config, source.header, mesh, ranks=ranks)
        said = check_partner(config, target, stored(made), None if headers_only else id_table(made, source))
    except InputError as e:
        raise type(e)([f"draft {a.name}: {p}" for p in e.problems]) from e
    # The layer count decides which layers are read if config.json names none.
    bound = {"kind": config.kind, "target_layers": target.text.layers}
    return Draft(name=a.name, source=source, plan=replace(made, bound=bound), said=tuple(said))


def stored(made: Plan) -> set[str]:
    """The draft's tensors by their names in the artifact."""
    return {item.name for item in made.expanded.items}


def id_table(made: Plan, source: Source) -> list[int] | None:
    """The values of d2t: what to add to a draft's id for the target's; None if the file has no such table."""
    import torch

    for item in made.expanded.items:
        if item.name == "d2t":
            name = item.sources[0][0]
            table: list[int] = source.rows(name, 0, made.header[name][1][0]).view(torch.int64).tolist()
            return table
    return None


def write(
    draft: Draft,
    artifact: Path,
    workers: int,
    progress: Callable[[int], None] = lambda n: None,
    command: str = "",
    part: Part | None = None,
) -> Report:
    """Puts a draft beside its finished target, or goes on with an unfinished one; nothing else is touched."""
    # Here and not above: plans and probes read headers only and never wait for torch.
    from convert.pipeline import convert

    made = replace(draft.plan, bound={**draft.plan.bound, "target": manifest.read(artifact)["digest"]})
    return convert(made, draft.source, artifact / DRAFTS / draft.name, workers, progress, command, part)


def warnings(draft: Draft) -> Iterator[str]:
    """What a user should know of a source before it is converted."""
    if not any(True for glob in LICENCE_GLOBS for _ in draft.source.path.glob(glob)):
        yield f"draft {draft.name}: no LICENSE file; the artifact must not be published without one"
