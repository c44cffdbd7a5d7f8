"""Rows x index ranges -> every output tensor and every source tensor, by name, with integer shapes. No bytes."""

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from specs.dims import ModelConfig, TextDims, VisionDims
from specs.draft import DraftConfig
from specs.errors import HeaderError, SpecError
from specs.schema import INDEX, Row, Spec

WORD_DTYPES = {"weight_packed": ("I32",), "weight_scale": ("BF16",), "weight_shape": ("I32", "I64")}
Dims = TextDims | VisionDims | DraftConfig
NEIGHBOURS = ("weight_g_idx", "weight_zero_point", "input_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the header must say of one source tensor."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row with its sizes filled in. `shapes`: per source, logical, without the stacked axis."""

    row: Row
    part: str
    shapes: tuple[tuple[int, ...], ...]
    stack: int
    take: tuple[int, int, int] | None

    @cached_property
    def split_axis(self) -> int | None:
        """Which logical axis tp or etp cuts, if any."""
        named = next((a for m, a in self.row.split.items() if m != "ep"), None)
        return None if named is None else self.row.axes.index(named)

    def stored(self, source: int) -> tuple[int, ...]:
        """Shape of the checkpoint's (unpacked) tensor: merged axes multiplied."""
        sizes = dict(zip(self.row.axes, self.shapes[source], strict=True))
        return tuple(prod(sizes[a] for a in group) for group in self.row.merge)

    def taken(self, source: int) -> tuple[int, ...]:
        """Logical shape after `take`."""
        shape = list(self.shapes[source])
        if self.take is not None:
            axis, low, high = self.take
            shape[axis] = high - low
        return tuple(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One output tensor. sources[e][j]: stem of stacked index e, fused source j. unit: its layer, or None."""

    name: str
    family: Family
    unit: int | None
    sources: tuple[tuple[str, ...], ...]

    def source_names(self) -> Iterable[str]:
        for stems in self.sources:
            for stem in stems:
                yield from tensor_names(self.family.row.format, stem)


@dataclass(frozen=True, kw_only=True)
class Expanded:
    """Every output tensor and every source tensor of one model."""

    items: tuple[Item, ...]
    expected: dict[str, Expected] = field(repr=False)
    dropped: dict[str, str] = field(repr=False)
    parts: dict[str, str] = field(repr=False)


def tensor_names(form: str, stem: str) -> tuple[str, ...]:
    """The checkpoint's tensors behind a stem of that format."""
    return (stem,) if form == "dense" else tuple(f"{stem}.{suffix}" for suffix in WORD_DTYPES)


def expand(spec: Spec, config: ModelConfig | DraftConfig, header: Collection[str]) -> Expanded:
    """The full table for this model. `header` decides only which name prefix is in use, and which optional rows are."""
    prefixes = _prefixes(spec, header)
    items: list[Item] = []
    expected: dict[str, Expected] = {}
    parts: dict[str, str] = {}
    for part_name, part in spec.parts.items():
        dims = config.parts[part_name]
        if dims is None:
            continue
        ranges = {k: (_size(spec, dims, low), _size(spec, dims, high)) for k, (low, high) in part.ranges.items()}
        for row in part.rows:
            family = _family(spec, part_name, row, dims, ranges)
            wanted = [_expected(family, j) for j in range(len(row.sources))]
            for item in _items(family, ranges, prefixes):
                if row.optional and not any(name in header for name in item.source_names()):
                    continue
                items.append(item)
                for stems in item.sources:
                    for stem, table in zip(stems, wanted, strict=True):
                        for suffix, want in table.items():
                            expected[stem + suffix] = want
                            parts[stem + suffix] = part_name
    dropped = {n: d.why for d in spec.drop for n in header if n not in expected and fnmatch.fnmatchcase(n, d.pattern)}
    return Expanded(items=tuple(items), expected=expected, dropped=dropped, parts=parts)


def _prefixes(spec: Spec, header: Collection[str]) -> dict[str, str]:
    """Per prefix name, the spelling under which its anchor tensor exists; any, if that may be absent and is."""
    chosen = {}
    rows = [row for part in spec.parts.values() for row in part.rows]
    for name, options in spec.prefixes.items():
        found: Sequence[str] = [p for p in options if spec.anchors[name].replace(f"{{{name}}}", p) in header]
        if not found and any(row.optional and spec.anchors[name] in row.sources for row in rows):
            found = options[:1]
        if len(found) != 1:
            tried = ", ".join(spec.anchors[name].replace(f"{{{name}}}", p) for p in options)
            state = "none of" if not found else "more than one of"
            raise HeaderError(
                f"checkpoint: found {state} {tried}; exactly one is expected. Is this a {spec.family} model?"
            )
        chosen[name] = found[0]
    return chosen


def _size(spec: Spec, dims: Dims, name: str) -> int:
    if name.isdigit():
        return int(name)
    value = getattr(dims, name, None)
    if not isinstance(value, int):
        raise SpecError(f"{spec.name}: {name!r} is not an integer size of {type(dims).__name__}")
    return value


def _family(spec: Spec, part: str, row: Row, dims: Dims, ranges: Mapping[str, tuple[int, int]]) -> Family:
    take = None
    if row.take is not None:
        axis, low, high = row.take
        take = (row.axes.index(axis), _size(spec, dims, low), _size(spec, dims, high))
    shapes = tuple(tuple(_size(spec, dims, s) for s in sizes) for sizes in row.sizes)
    stack = 0 if row.stack is None else ranges[row.stack][1] - ranges[row.stack][0]
    return Family(row=row, part=part, shapes=shapes, stack=stack, take=take)


def _expected(family: Family, source: int) -> dict[str, Expected]:
    """Suffix -> what the header must say of source j's tensors."""
    shape = family.stored(source)
    if family.row.format == "dense":
        return {"": Expected(dtypes=(family.row.dtype,), shape=shape)}
    n, k = shape
    shapes = {"weight_packed": (n, k // 8), "weight_scale": (n, k // 32), "weight_shape": (2,)}
    return {f".{s}": Expected(dtypes=WORD_DTYPES[s], shape=shapes[s]) for s in shapes}


def _items(family: Family, ranges: Mapping[str, tuple[int, int]], prefixes: Mapping[str, str]) -> Iterable[Item]:
    row = family.row
    outer = INDEX.findall(row.to)
    units: Iterable[int | None] = range(*ranges[outer[0]]) if outer else (None,)
    patterns = [_with_prefix(s, prefixes) for s in row.sources]
    for unit in units:
        stems = [p if unit is None else p.replace(f"{{{outer[0]}}}", str(unit)) for p in patterns]
        if row.stack is None:
            sources: tuple[tuple[str, ...], ...] = (tuple(stems),)
        else:
            hole = f"{{{row.stack}}}"
            sources = tuple(tuple(s.replace(hole, str(e)) for s in stems) for e in range(*ranges[row.stack]))
        name = row.to if unit is None else row.to.replace(f"{{{outer[0]}}}", str(unit))
        yield Item(name=name, family=family, unit=unit, sources=sources)


def _with_prefix(pattern: str, prefixes: Mapping[str, str]) -> str:
    for name, value in prefixes.items():
        pattern = pattern.replace(f"{{{name}}}", value)
    return pattern


def check_header(expanded: Expanded, header: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Header (name -> dtype, shape) against the table, both ways; HeaderError lists all that differs."""
    problems: list[str] = []
    for name, want in expanded.expected.items():
        found = header.get(name)
        if found is None:
            problems.append(f"{name}: missing, expected {'|'.join(want.dtypes)} {list(want.shape)}")
        elif found[0] not in want.dtypes or found[1] != want.shape:
            problems.append(
                f"{name}: found {found[0]} {list(found[1])}, expected {'|'.join(want.dtypes)} {list(want.shape)}"
            )
    for name in header:
        if name not in expanded.expected and name not in expanded.dropped:
            hint = (
                " (only symmetric INT4 without g_idx or zero points is supported)" if name.endswith(NEIGHBOURS) else ""
            )
            problems.append(
                f"{name}: unexpected {header[name][0]} {list(header[name][1])}, no row of the spec reads it{hint}"
            )
    if problems:
        raise HeaderError(problems)
