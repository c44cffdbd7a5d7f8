"""Tuning tables: which config was fastest for a problem on one kind of GPU. Reading and looking up; never timing.

A table is one JSON file, sealed by its own digest. `tuned/` holds those that ship with the package; an artifact may
hold more in tuning/, bound to its weights. A config counts only while the op's device code is what it was tuned with.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from runtime_min.kernels import index
from runtime_min.kernels.launch import Problem
from specs import manifest
from specs.errors import InputError

FORMAT = "kiln-tuning"
VERSION = 1
TUNED = Path(__file__).parent / "tuned"


class TuningError(InputError):
    """A tuning table is not what it says it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where configs were timed: what may change which is fastest."""

    device: str
    arch: str
    triton: str
    fp_fusion: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One problem's fastest config: microseconds a call, their spread (largest less smallest over the median), the
    default's microseconds in the same race, and how many configs ran."""

    problem: Problem
    config: Any
    us: float
    spread: float
    default_us: float
    tried: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Configs of one device; `stale` ops were tuned with other device code or other fields, and count for nothing."""

    path: Path
    digest: str
    setting: Setting
    entries: tuple[Entry, ...]
    stale: tuple[str, ...]

    def configs(self) -> dict[Problem, Any]:
        return {e.problem: e.config for e in self.entries}


def built(kind: type, values: Any) -> Any:
    """A dataclass from its JSON form; ValueError unless fields and their types are exactly its own."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = {f.name for f in fields(kind)}
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError(f"{kind.__name__} has fields {sorted(names)}, found {values!r}")
        return kind(**{name: built(hints[name], values[name]) for name in names})
    if get_origin(kind) is tuple:
        if not isinstance(values, list) or len(values) != len(get_args(kind)):
            raise ValueError(f"expected {kind}, found {values!r}")
        return tuple(built(k, v) for k, v in zip(get_args(kind), values, strict=True))
    if type(values) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {values!r}")
    return values


def slug(device: str) -> str:
    """A device's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def sealed(setting: Setting, entries: Iterable[Entry], weights: str = "") -> bytes:
    """The file of a table: the same entries give the same bytes. weights: digest of the artifact that it lies in."""
    ops: dict[str, Any] = {}
    for e in sorted(entries, key=lambda e: (e.problem.op, repr(e.problem))):
        ops.setdefault(e.problem.op, {"source": index.source_digest(e.problem.op), "entries": []})
        ops[e.problem.op]["entries"].append(asdict(e))
    body = {"format": FORMAT, "version": VERSION, "weights": weights, "setting": asdict(setting), "ops": ops}
    return manifest.seal(body)


def read(path: Path, weights: str = "") -> Table:
    """The table in `path`; TuningError if it is damaged or belongs to an artifact of another digest."""
    found = manifest.read_json(path)
    remake = "delete it, or make it again with `kiln-run tune`"
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise TuningError(f"{path}: is no {FORMAT} table of version {VERSION}; {remake}")
    if not manifest.intact(found):
        raise TuningError(f"{path}: was changed after sealing; {remake}")
    if found["weights"] != weights:
        raise TuningError(f"{path}: belongs to weights {found['weights'] or 'of no artifact'}, not {weights}; {remake}")
    entries: list[Entry] = []
    stale = []
    for op, rows in found["ops"].items():
        mine = _entries(op, rows)
        if mine is None:
            stale.append(op)
        else:
            entries += mine
    setting = built(Setting, found["setting"])
    return Table(
        path=path, digest=str(found["digest"]), setting=setting, entries=tuple(entries), stale=tuple(stale)
    )  # fmt: skip


def _entries(op: str, rows: Any) -> list[Entry] | None:
    """What was tuned for an op; None if that is not the op that is installed."""
    if not index.same_source(op, rows["source"]):
        return None
    try:
        return [entry(op, row) for row in rows["entries"]]
    except ValueError:
        return None


def entry(op: str, row: Mapping[str, Any]) -> Entry:
    """An entry from its JSON form, whose other fields do not matter; ValueError if the op has other fields now."""
    launch = import_module(f"runtime_min.kernels.{op}.launch")
    problem, config = built(launch.Problem, row["problem"]), built(launch.Config, row["config"])
    times = {k: row[k] for k in ("us", "spread", "default_us", "tried")}
    return Entry(problem=problem, config=config, **times)


def put(artifact: Path, arch: str, weights: str) -> None:
    """Copies the package's tables of an architecture into an artifact that has none of that device, bound to it."""
    for table in tables(arch):
        target = artifact / "tuning" / table.path.name
        if not target.exists():
            write(target, sealed(table.setting, table.entries, weights))


def write(path: Path, data: bytes) -> None:
    """A table's file, in a folder that is made if need be; a partial one never carries the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(data)
    draft.rename(path)


def tables(arch: str, artifact: Path | None = None, weights: str = "") -> list[Table]:
    """Every table for an architecture: the artifact's own first, then the package's."""
    own = sorted((artifact / "tuning").glob("*.json")) if artifact is not None else []
    found = [read(path, weights) for path in own] + [read(path) for path in sorted(TUNED.glob("*.json"))]
    return [t for t in found if t.setting.arch == arch]
