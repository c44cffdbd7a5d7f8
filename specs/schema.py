"""Spec, Part, Row: one model's table of tensors, and the strict reader of its YAML."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from specs.errors import SpecError
from specs.mesh import Axis

FORMATS = ("dense", "ct_int4_g32")
LAYOUTS = ("plain", "int4_tile")
DTYPES = ("BF16", "F32", "I64")
MESH_AXES: tuple[Axis, ...] = ("tp", "ep", "etp")
INDEX = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One family of output tensors; sizes are names of specs/dims.py fields. optional: a checkpoint may lack it."""

    to: str
    sources: tuple[str, ...]
    format: str
    dtype: str
    axes: tuple[str, ...]
    sizes: tuple[tuple[str, ...], ...]
    merge: tuple[tuple[str, ...], ...]
    take: tuple[str, str, str] | None
    layout: str
    split: dict[Axis, str]
    stack: str | None
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    ranges: dict[str, tuple[str, str]]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Source tensors left out on purpose: a wildcard and the reason."""

    pattern: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    name: str
    family: str
    repo: str
    prefixes: dict[str, tuple[str, ...]]
    anchors: dict[str, str]
    drop: tuple[Drop, ...]
    parts: dict[str, Part]
    digest: str


class Reader:
    """Walks one YAML mapping; every error carries the path to it."""

    def __init__(self, path: str, value: object, known: tuple[str, ...]) -> None:
        if not isinstance(value, dict):
            raise SpecError(f"{path}: found {value!r}, expected a mapping")
        unknown = sorted(set(value) - set(known)) if known else []
        if unknown:
            raise SpecError(f"{path}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
        self.path, self.value = path, value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        if key not in self.value:
            raise SpecError(f"{self.path}: missing key {key!r}")
        return self.optional(key, kind, None)

    def optional(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self.value.get(key, default)
        if key in self.value and not isinstance(value, kind):
            raise SpecError(f"{self.path}.{key}: found {value!r}, expected {kind}")
        return value


def names() -> list[str]:
    """Specs in the package that name tensors (archs.yaml is no spec)."""
    files = resources.files("specs").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml") and f.name != "archs.yaml")


def load(name: str) -> Spec:
    """The spec of that name; SpecError with the YAML path if the file is not one."""
    if name not in names():
        raise SpecError(f"no spec named {name!r}; known: {', '.join(names())}")
    text = resources.files("specs").joinpath(f"{name}.yaml").read_text()
    return parse(name, text)


def archs() -> dict[str, dict[str, Any]]:
    """GPU architectures by name (archs.yaml)."""
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(resources.files("specs").joinpath("archs.yaml").read_text())
    return loaded


def parse(name: str, text: str) -> Spec:
    """A Spec from YAML text."""
    r = Reader(name, yaml.safe_load(text), ("family", "source", "prefixes", "anchors", "drop", "parts"))
    source = Reader(f"{name}.source", r.need("source", dict), ("repo",))
    prefixes = {k: tuple(v) for k, v in r.optional("prefixes", dict, {}).items()}
    anchors = r.optional("anchors", dict, {})
    if set(anchors) != set(prefixes):
        raise SpecError(f"{name}.anchors: found {sorted(anchors)}, expected one per prefix: {sorted(prefixes)}")
    drops = [Reader(f"{name}.drop[{i}]", d, ("pattern", "why")) for i, d in enumerate(r.optional("drop", list, []))]
    parts = {k: _part(f"{name}.parts.{k}", v, tuple(prefixes)) for k, v in r.need("parts", dict).items()}
    return Spec(
        name=name,
        family=r.need("family", str),
        repo=source.need("repo", str),
        prefixes=prefixes,
        anchors=anchors,
        drop=tuple(Drop(pattern=d.need("pattern", str), why=d.need("why", str)) for d in drops),
        parts=parts,
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def _part(path: str, value: object, prefixes: tuple[str, ...]) -> Part:
    r = Reader(path, value, ("ranges", "tensors"))
    ranges: dict[str, tuple[str, str]] = {}
    for letter, bounds in r.optional("ranges", dict, {}).items():
        if not isinstance(bounds, list) or len(bounds) != 2:
            raise SpecError(f"{path}.ranges.{letter}: found {bounds!r}, expected [low, high]")
        ranges[letter] = (str(bounds[0]), str(bounds[1]))
    rows = tuple(_row(f"{path}.tensors[{i}]", v, ranges, prefixes) for i, v in enumerate(r.need("tensors", list)))
    seen: dict[str, int] = {}
    for i, row in enumerate(rows):
        if row.to in seen:
            raise SpecError(f"{path}.tensors[{i}].to: {row.to!r} is already made by tensors[{seen[row.to]}]")
        seen[row.to] = i
    _whole(path, rows)
    return Part(ranges=ranges, rows=rows)


def _whole(path: str, rows: tuple[Row, ...]) -> None:
    """Rows that read the same source must together take all of it, once."""
    bounds: dict[str, list[tuple[str, str]]] = {}
    whole: dict[str, tuple[str, str]] = {}
    for row in rows:
        for j, source in enumerate(row.sources):
            axis = row.take[0] if row.take else row.axes[0]
            whole[source] = ("0", row.sizes[j][row.axes.index(axis)])
            bounds.setdefault(source, []).append(row.take[1:] if row.take else whole[source])
    for source, takes in bounds.items():
        ends = ["0", *(high for _, high in takes)]
        if [low for low, _ in takes] != ends[:-1] or ends[-1] != whole[source][1]:
            raise SpecError(f"{path}: rows take {takes} of {source!r}, expected all of 0..{whole[source][1]}, in order")


def _row(path: str, value: object, ranges: Mapping[str, object], prefixes: tuple[str, ...]) -> Row:
    r = Reader(path, value, ("to", "from", "format", "dtype", "shape", "merge", "take", "layout", "split", "optional"))
    to, raw = r.need("to", str), r.need("from", (str, list))
    sources = (raw,) if isinstance(raw, str) else tuple(raw)
    form = _word(r, "format", "dense", FORMATS)
    shape = r.need("shape", dict)
    stack = _stack(path, to, sources, ranges, prefixes)
    if stack is not None and (stack not in shape or next(iter(shape)) != stack):
        raise SpecError(f"{path}.shape: the stacked index {stack!r} must be the first axis")
    if (stack is not None) != (form == "ct_int4_g32"):
        raise SpecError(f"{path}: stacked rows are ct_int4_g32 and nothing else is")
    axes = tuple(a for a in shape if a != stack)
    sizes = []
    for j in range(len(sources)):
        per = [shape[a][j] if isinstance(shape[a], list) and j < len(shape[a]) else shape[a] for a in axes]
        if not all(isinstance(p, str) for p in per):
            raise SpecError(f"{path}.shape: found {per}, expected names, or one name per source")
        sizes.append(tuple(per))
    split = r.need("split", dict)
    for mesh_axis, axis in split.items():
        if mesh_axis not in MESH_AXES:
            raise SpecError(f"{path}.split: {mesh_axis!r} is not a mesh axis: {', '.join(MESH_AXES)}")
        if axis not in shape:
            raise SpecError(f"{path}.split.{mesh_axis}: {axis!r} is not an axis of this row: {', '.join(shape)}")
        if (axis == stack) != (mesh_axis == "ep"):
            raise SpecError(f"{path}.split.{mesh_axis}: ep divides the stacked axis and nothing else does")
    if len(set(split) - {"ep"}) > 1:
        raise SpecError(f"{path}.split: one axis besides the stacked one may be cut, found {split}")
    return Row(
        to=to,
        sources=sources,
        format=form,
        dtype=_word(r, "dtype", "BF16", DTYPES),
        axes=axes,
        sizes=tuple(sizes),
        merge=_merge(path, r.optional("merge", list, []), axes),
        take=_take(path, r.optional("take", dict, {}), axes),
        layout=_word(r, "layout", "plain", LAYOUTS),
        split=split,
        stack=stack,
        optional=r.optional("optional", bool, False),
    )


def _word(r: Reader, key: str, default: str, known: tuple[str, ...]) -> str:
    value: str = r.optional(key, str, default)
    if value not in known:
        raise SpecError(f"{r.path}.{key}: found {value!r}, expected one of {', '.join(known)}")
    return value


def _stack(
    path: str, to: str, sources: tuple[str, ...], ranges: Mapping[str, object], prefixes: tuple[str, ...]
) -> str | None:
    """The one index of `from` that `to` lacks."""
    outer = set(INDEX.findall(to))
    inner = {i for s in sources for i in INDEX.findall(s)} - set(prefixes)
    for letter in outer | inner:
        if letter not in ranges:
            raise SpecError(f"{path}: index {{{letter}}} has no range; known: {', '.join(ranges)}")
    if outer - inner or len(inner - outer) > 1 or len(outer) > 1:
        raise SpecError(f"{path}: indices of `to` {sorted(outer)} and `from` {sorted(inner)} do not fit")
    return next(iter(inner - outer), None)


def _merge(path: str, value: list[object], axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Groups of neighbouring axes that the stored tensor has as one; every axis in exactly one group."""
    groups: list[tuple[str, ...]] = []
    merged = [tuple(str(v).split()) for v in value]
    rest = list(axes)
    while rest:
        group = next((m for m in merged if m and m[0] == rest[0]), (rest[0],))
        if tuple(rest[: len(group)]) != group:
            raise SpecError(f"{path}.merge: {' '.join(group)!r} are not neighbouring axes of {' '.join(axes)!r}")
        groups.append(group)
        rest = rest[len(group) :]
    if len(merged) != sum(len(g) > 1 for g in groups):
        raise SpecError(f"{path}.merge: found {value}, not all are groups of {' '.join(axes)!r}")
    return tuple(groups)


def _take(path: str, value: dict[str, Any], axes: tuple[str, ...]) -> tuple[str, str, str] | None:
    if not value:
        return None
    (axis, bounds), *more = value.items()
    if more or axis not in axes or not isinstance(bounds, list) or len(bounds) != 2:
        raise SpecError(f"{path}.take: found {value!r}, expected one axis with [low, high]")
    return axis, str(bounds[0]), str(bounds[1])
