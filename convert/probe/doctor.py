"""doctor: will this finished artifact serve from this machine, and would anything compile at the start?"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from convert.probe import card, checkpoint, host, kernels
from convert.probe.line import Line, refusal, unasked
from convert.probe.speed import disk_speed
from convert.readers.artifact import ArtifactSource
from convert.readers.sealed import Sealed, read_indices
from convert.repack.verify import verify
from convert.tables import size
from specs.config import read_config
from specs.errors import InputError
from specs.schema import archs
from specs.storage import nbytes

DEFAULT_ARCH = "sm90"
AFTER_SEAL = ("files", "mesh", "gpus", "layouts", "kernels", "tuning", "gpu memory", "load", "licence", "tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of this machine. arch: its name in archs.yaml's spelling; memory in bytes."""

    name: str
    arch: str
    memory: int


def gpus_here() -> list[Gpu]:
    """The GPUs that torch sees; none without a driver."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return [Gpu(name=p.name, arch=f"sm{p.major}{p.minor}", memory=p.total_memory) for p in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """The artifact, and the machine it should run on. arch None is this machine's; gpu_memory in GB, None is found."""

    artifact: Path
    gpus: list[Gpu]
    arch: str | None = None
    context: int | None = None
    gpu_memory: float | None = None


def doctor(p: Patient) -> list[Line]:
    """One line for each thing that decides whether the artifact will start and serve here."""
    return [*_about_artifact(p), host.packages_line()]


def _about_artifact(p: Patient) -> Iterator[Line]:
    try:
        source = ArtifactSource(p.artifact)
    except InputError as e:
        yield refusal("seal", e, f"run `kiln verify {p.artifact}`, then fetch or convert again")
        yield from unasked(AFTER_SEAL, "the seal")
        return
    sealed, config = source.sealed, read_config(source.config)
    source.close()
    yield Line(name="seal", verdict="go", found=f"{p.artifact}: {sealed.manifest['digest']}", facts=_papers(sealed))
    yield files_line(p.artifact)
    yield checkpoint.mesh_line("mesh", sealed.mesh, str(sealed.mesh), sealed.manifest["mesh"])
    yield gpus_line(p.gpus, sealed.mesh.world, p.arch)
    name = p.arch or (p.gpus[0].arch if p.gpus else DEFAULT_ARCH)
    if name in archs():
        arch = archs()[name]
        yield kernels.layouts_line(name, arch, sealed.manifest["layouts"])
        yield kernels.kernels_line(name, arch, p.artifact, sealed.manifest["digest"])
        yield tuning_line(p.artifact)
        yield card.memory_line(_card(p, name), rank_bytes(sealed), config.text, p.context)
    else:
        yield from unasked(("layouts", "kernels", "tuning", "gpu memory"), "gpus")
    yield load_line(p.artifact, sealed)
    yield checkpoint.licence_line(source)
    yield checkpoint.tokenizer_line(source)


def _papers(sealed: Sealed) -> dict[str, object]:
    return {k: sealed.manifest[k] for k in ("digest", "version", "logical")}


def _card(p: Patient, arch: str) -> card.Card:
    """--gpu-memory, or the smallest GPU here, or the nominal card of the architecture."""
    if p.gpu_memory is None and p.gpus and p.arch in (None, p.gpus[0].arch):
        least = min(p.gpus, key=lambda g: g.memory)
        return card.Card(name=least.name, memory=least.memory, source="found here")
    return card.nominal(archs()[arch], p.gpu_memory)


def files_line(artifact: Path) -> Line:
    """Sizes, headers and small files, as `kiln verify --quick` checks them."""
    verdict = verify(artifact, "quick")
    if not verdict.ok:
        problems = InputError(verdict.problems)
        return refusal("files", problems, f"run `kiln verify {artifact}`, then fetch or convert again")
    if verdict.warnings:
        do = "remove what is not part of it"
        return Line(name="files", verdict="warn", found="; ".join(verdict.warnings[:3]), do=do)
    found = "every file has its size and header, small files their digests; `kiln verify` reads the rest"
    return Line(name="files", verdict="go", found=found)


def gpus_line(gpus: list[Gpu], world: int, arch: str | None) -> Line:
    """One GPU of one known kind for each rank."""
    facts = {"gpus": [g.name for g in gpus], "archs": sorted({g.arch for g in gpus}), "world": world}
    if not gpus:
        found = f"no GPU here; the artifact wants {world}"
        do = "move it to a machine with GPUs, or run it slowly with --device cpu"
        return Line(name="gpus", verdict="warn", found=found, do=do, facts=facts)
    kinds = sorted({g.arch for g in gpus})
    found = f"{len(gpus)} x {gpus[0].name} ({', '.join(kinds)}), {world} wanted"
    known = ", ".join(archs())
    if len(kinds) > 1:
        return Line(name="gpus", verdict="no-go", found=found, do="show it GPUs of one kind only", facts=facts)
    if kinds[0] not in archs():
        return Line(name="gpus", verdict="no-go", found=found, do=f"use one of {known}", facts=facts)
    if arch is not None and arch != kinds[0]:
        do = f"leave --arch out, or use --arch {kinds[0]}"
        return Line(name="gpus", verdict="no-go", found=f"{found}; --arch {arch} asked for", do=do, facts=facts)
    if len(gpus) < world:
        do = f"use a machine with {world}, or `kiln convert ARTIFACT --tp {len(gpus)}`"
        return Line(name="gpus", verdict="no-go", found=found, do=do, facts=facts)
    return Line(name="gpus", verdict="go", found=found, facts=facts)


def tuning_line(artifact: Path) -> Line:
    """The measured kernel choices that came along."""
    tables = sorted(t.name for t in (artifact / "tuning").glob("*.json"))
    if tables:
        return Line(name="tuning", verdict="go", found=f"tables {', '.join(tables)}", facts={"tables": tables})
    found = "no table in tuning/: default choices are used, right but slower"
    return Line(name="tuning", verdict="warn", found=found, do="tune on this GPU", facts={"tables": []})


def rank_bytes(sealed: Sealed) -> int:
    """Tensor bytes that the fullest rank holds: its own, the common ones and the vision part."""
    totals = {
        key: sum(nbytes(tuple(e["shape"]), e["dtype"]) for found in entries.values() for e in found)
        for key, entries in read_indices(sealed).items()
    }
    shared = sum(n for (store, _), n in totals.items() if store != "rank")
    return shared + max(n for (store, _), n in totals.items() if store == "rank")


def load_line(artifact: Path, sealed: Sealed) -> Line:
    """Seconds to read every file once, at the speed that was measured here."""
    speed = disk_speed(artifact / f for f in sealed.files if f.endswith(".safetensors"))
    total = sum(n for n, _ in sealed.files.values())
    seconds = total / speed.bytes_per_second
    facts = {"bytes": total, "load_seconds": round(seconds, 1), "disk_bytes_per_second": round(speed.bytes_per_second)}
    found = f"{size(total)} in about {host.span(seconds)}; {speed.how}"
    return Line(name="load", verdict="go", found=found, facts={**facts, "disk_measured": speed.measured})
