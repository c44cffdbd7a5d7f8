"""Headers folded without loss: names that differ only in their numbers share one entry."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

NUMBER = re.compile(r"\d+")
Signature = tuple[str, tuple[int, ...]]


def fold(header: Mapping[str, Signature]) -> list[dict[str, Any]]:
    """name -> (dtype, shape), as a short list of {pattern, index, dtype, shape}; `unfold` gives it back exactly.

    `index` holds one list of [low, high] runs per number in the name. A family that is no full product of its
    indices falls apart into its names.
    """
    families: dict[tuple[str, Signature], list[tuple[int, ...]]] = defaultdict(list)
    for name, signature in header.items():
        numbers = NUMBER.findall(name)
        canonical = all(n == str(int(n)) for n in numbers)
        pattern = NUMBER.sub("{}", name) if canonical else name
        families[pattern, signature].append(tuple(map(int, numbers)) if canonical else ())
    out = []
    for (pattern, (dtype, shape)), rows in families.items():
        axes = [sorted(set(axis)) for axis in zip(*rows, strict=True)]
        common = {"dtype": dtype, "shape": list(shape)}
        if prod(map(len, axes)) == len(rows):
            out.append({"pattern": pattern, "index": [_runs(a) for a in axes], **common})
        else:
            out += [{"pattern": pattern, "index": [[[i, i]] for i in row], **common} for row in rows]
    return sorted(out, key=lambda f: (f["pattern"], f["index"]))


def unfold(folded: list[dict[str, Any]]) -> Iterator[tuple[str, Signature]]:
    """The names, dtypes and shapes that `fold` folded."""
    for family in folded:
        axes = [[i for low, high in runs for i in range(low, high + 1)] for runs in family["index"]]
        for numbers in product(*axes):
            yield (
                family["pattern"].format(*numbers) if axes else family["pattern"],
                (family["dtype"], tuple(family["shape"])),
            )


def count(family: Mapping[str, Any]) -> int:
    """How many names one folded entry stands for."""
    return prod(sum(high - low + 1 for low, high in runs) for runs in family["index"])


def _runs(values: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for v in values:
        if runs and runs[-1][1] == v - 1:
            runs[-1][1] = v
        else:
            runs.append([v, v])
    return runs
