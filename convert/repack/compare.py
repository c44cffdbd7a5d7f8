"""An artifact's tensors, unpacked: their logical digests, and where they differ from another source."""

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from convert.readers.artifact import ArtifactSource
from convert.readers.files import as_bytes
from convert.readers.source import Source
from convert.repack.assemble import BLOCK_BYTES
from convert.shard.plan import without_vision
from specs import manifest
from specs.config import read_config
from specs.expand import tensor_names
from specs.schema import load
from specs.storage import nbytes


@dataclass(frozen=True, kw_only=True)
class Sample:
    """`count` stored tensors of every rank, chosen by `seed`; against a source also `count` experts or tensors."""

    count: int
    seed: int = 0


def contents(
    source: ArtifactSource,
    against: Source | None,
    workers: int,
    progress: Callable[[int], None],
    sample: Sample | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Logical digests by unpacking (of a sample: of the chosen tensors), and the differences from `against`."""
    problems: list[str] = []
    if against is not None:
        theirs = against.header
        if "text" in source.manifest.get("parts", ("text",)) and not manifest.has_vision(source.manifest):
            theirs = without_vision(load(source.manifest["model"]["spec"]), read_config(against.config), theirs)
        dropped = {d["name"] for d in source.manifest["coverage"]["dropped"]}
        theirs = {n: facts for n, facts in theirs.items() if n not in dropped}
        problems = [
            f"{n}: is in {'the artifact' if n in source.header else 'the source'} only, or of another dtype or shape"
            for n in sorted({k for k, _ in set(source.header.items()) ^ set(theirs.items())})
        ]
    lines: dict[str, dict[str, tuple[str, tuple[int, ...], str]]] = defaultdict(dict)
    bundles = list(_bundles(source))
    if sample is not None:
        bundles = random.Random(sample.seed).sample(bundles, min(sample.count, len(bundles)))
    with ThreadPoolExecutor(workers) as pool:
        for digests, differences in pool.map(partial(_compare, source, against, progress), bundles):
            problems += differences
            for name, sha in digests.items():
                lines[source.expanded.parts[name]][name] = (*source.header[name], sha)
    return {part: manifest.logical_digest(found) for part, found in sorted(lines.items())}, problems


def _bundles(source: ArtifactSource) -> Iterator[list[str]]:
    """Source names that are unpacked together: one expert's, or one dense tensor."""
    seen: set[str] = set()
    for item in source.expanded.items:
        for stems in item.sources:
            names = [n for stem in stems for n in tensor_names(item.family.row.format, stem) if n not in seen]
            seen.update(names)
            if item.family.stack:
                yield names
            else:
                yield from ([n] for n in names)


def _compare(
    source: ArtifactSource, against: Source | None, progress: Callable[[int], None], names: list[str]
) -> tuple[dict[str, str], list[str]]:
    digests, problems = {}, []
    for name in names:
        digest, different, first = hashlib.sha256(), 0, -1
        dtype, shape = source.header[name]
        both = against is not None and against.header.get(name) == (dtype, shape)
        for low, high in _blocks(shape, dtype, source, name):
            mine = source.rows(name, low, high)
            digest.update(as_bytes(mine))
            if both and against is not None:
                theirs = against.rows(name, low, high)
                if not torch.equal(mine, theirs):
                    bad = (mine != theirs).nonzero()
                    first = first if different else low * (mine.numel() // (high - low)) + int(bad[0])
                    different += len(bad)
            progress(mine.numel())
        digests[name] = digest.hexdigest()
        if different:
            problems.append(
                f"{name}: {different} bytes differ from the source, the first at byte {first} of {dtype} {list(shape)}"
            )
    return digests, problems


def _blocks(shape: tuple[int, ...], dtype: str, source: ArtifactSource, name: str) -> Iterator[tuple[int, int]]:
    """Row ranges of at most BLOCK_BYTES, in whole heads."""
    step = source.leading(name)
    rows = max(1, BLOCK_BYTES // max(1, nbytes(shape, dtype) // shape[0]) // step) * step
    for low in range(0, shape[0], rows):
        yield low, min(shape[0], low + rows)
