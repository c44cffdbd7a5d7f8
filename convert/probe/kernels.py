"""Which kernels will run: the layouts an architecture reads, and the compiled kernels an artifact may bring along."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.probe.line import Line
from specs import manifest
from specs.errors import ArtifactError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelIndex:
    """`kernels/<arch>/index.json`. kernels: symbol -> shared memory of a block in bytes. weights: the manifest digest
    that the kernels were compiled for."""

    arch: str
    weights: str
    kernels: dict[str, int]


def read_index(artifact: Path, arch: str) -> KernelIndex | None:
    """The compiled kernels for an architecture, or None if there are none; ArtifactError for a broken index."""
    path = artifact / "kernels" / arch / "index.json"
    if not path.exists():
        return None
    found = manifest.read_json(path)
    rows = found.get("kernels")
    if not isinstance(found.get("arch"), str) or not isinstance(found.get("weights"), str) or not _are_kernels(rows):
        raise ArtifactError(f"{path}: expected arch, weights, and kernels with symbol and shared_bytes")
    assert isinstance(rows, list)
    kernels = {row["symbol"]: row["shared_bytes"] for row in rows}
    return KernelIndex(arch=found["arch"], weights=found["weights"], kernels=kernels)


def _are_kernels(rows: object) -> bool:
    return isinstance(rows, list) and all(
        isinstance(r, dict) and isinstance(r.get("symbol"), str) and type(r.get("shared_bytes")) is int for r in rows
    )


def layouts_line(arch: str, facts: dict[str, Any], needed: Collection[str]) -> Line:
    """Whether the architecture's kernels read what the artifact stores."""
    unreadable = sorted(set(needed) - set(facts["layouts"]))
    if unreadable:
        return Line(
            name="layouts",
            verdict="no-go",
            found=f"no kernels on {arch} read {', '.join(unreadable)}; they read {', '.join(facts['layouts'])}",
            do="choose another --arch, or convert with a kiln that stores a layout from that list",
        )
    return Line(
        name="layouts",
        verdict="go",
        found=f"{arch} ({facts['name']}) reads {', '.join(sorted(needed))}",
        facts={"layouts": sorted(needed)},
    )


def kernels_line(arch: str, facts: dict[str, Any], artifact: Path | None, digest: str = "") -> Line:
    """Whether anything would compile at the start, and whether what is compiled fits the card's shared memory."""
    limit = facts["shared_bytes"]
    later = {"shared_bytes": limit, "compiles_at_start": True}
    if artifact is None:
        most = facts["kernel_bytes"]
        found = f"a block takes up to {most:,} of {limit:,} bytes of shared memory; `kiln-run compile` makes them"
        return Line(name="kernels", verdict="go", found=found, facts=later | {"kernel_bytes": most})
    try:
        index = read_index(artifact, arch)
    except InputError as e:
        do = f"remove {artifact / 'kernels' / arch}"
        return Line(name="kernels", verdict="no-go", found="; ".join(e.problems), do=do, facts=later)
    if index is None:
        found = f"no kernels/{arch}/index.json: the kernels compile at the first start"
        do = "expect a slower first start"
        return Line(name="kernels", verdict="warn", found=found, do=do, facts=later)
    return _index_line(index, arch, limit, digest)


def _index_line(index: KernelIndex, arch: str, limit: int, digest: str) -> Line:
    """Compiled kernels against the architecture, its shared memory, and the artifact that they belong to."""
    over = {s: n for s, n in index.kernels.items() if n > limit}
    problems = [f"{s} wants {n:,} bytes of shared memory, a block has {limit:,}" for s, n in over.items()]
    if index.arch != arch:
        problems.append(f"compiled for {index.arch}")
    if index.weights != digest:
        problems.append("compiled for an artifact of another digest")
    facts = {"shared_bytes": limit, "compiles_at_start": bool(problems), "kernels": len(index.kernels)}
    if problems:
        found, do = f"kernels/{arch}: " + "; ".join(problems), f"remove kernels/{arch} or compile it again"
        return Line(name="kernels", verdict="no-go", found=found, do=do, facts=facts)
    found = f"{len(index.kernels)} compiled, all within {limit:,} bytes of shared memory; nothing compiles at the start"
    return Line(name="kernels", verdict="go", found=found, facts=facts)
