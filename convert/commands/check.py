"""inspect, verify: what an artifact is, and whether it still is that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.common import AS_JSON, WORKERS, emit, workers_default
from specs.errors import InputError

if TYPE_CHECKING:
    from convert.repack.compare import Sample
    from convert.repack.verify import Mode, Verdict


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def inspect(artifact: Path, as_json: bool) -> None:
    """Show what ARTIFACT is: from which source, for which mesh, in which layouts, how large.

    Reads the manifest alone; `kiln verify` tells whether the files still are what it says.
    """
    from convert import provenance
    from convert.tables import inspect_facts, inspect_text
    from specs import manifest

    sealed = manifest.read(artifact)
    facts = inspect_facts(artifact, sealed, provenance.read(artifact))
    emit(as_json, facts, inspect_text(facts))


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True, help="Only sizes, headers and small files; seconds.")
@click.option("--sample", type=click.IntRange(min=1), default=None, metavar="N", help="N stored tensors of every rank.")
@click.option("--seed", type=int, default=0, help="Which ones --sample chooses.")
@click.option("--against", default=None, metavar="MODEL", help="Compare elements with this checkpoint or artifact.")
@WORKERS
@AS_JSON
def verify(
    artifact: Path,
    quick: bool,
    sample: int | None,
    seed: int,
    against: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Check ARTIFACT and its drafts: every file's sha256, and the logical digest by unpacking every tensor.

    The logical digest speaks of the source's tensors: it is the same for every artifact made from one checkpoint,
    whatever the mesh. --against compares what ARTIFACT names; of ARTIFACT/draft/NAME that is the draft. With --sample
    and --against, N experts or tensors are compared instead of all.
    """
    from convert.progress import Progress
    from convert.readers.find import find
    from convert.readers.sealed import drafts, read_sealed
    from convert.repack.compare import Sample
    from convert.repack.verify import verify as run
    from specs import manifest

    if quick and (against is not None or sample is not None):
        raise click.UsageError("--quick reads no tensor, --against and --sample do; choose one")
    source = find(against) if against is not None else None
    seals = [read_sealed(artifact).manifest, *map(manifest.read, drafts(artifact))]
    mode: Mode = "quick" if quick else "full" if sample is None else "sample"
    total = sum(sum(f["size"] for f in m["files"]) + m["source"]["bytes"] for m in seals)
    chosen = None if sample is None else Sample(count=sample, seed=seed)
    with Progress("verify", total if mode == "full" else 0) as progress:
        verdict = run(artifact, mode, source, workers or workers_default(), progress, chosen)
    for line in verdict.warnings:
        click.echo(f"warning: {line}", err=True)
    if not verdict.ok:
        for line in InputError(verdict.problems).lines():
            click.echo(f"error: {line}", err=True)
    facts = verdict_facts(verdict, against, chosen)
    emit(as_json, facts, verdict_text(artifact, verdict, against, chosen))
    if not verdict.ok:
        raise click.exceptions.Exit(1)


def verdict_facts(verdict: Verdict, against: str | None, sample: Sample | None) -> dict[str, Any]:
    """`kiln verify --json`."""
    return {
        "ok": verdict.ok,
        "mode": verdict.mode,
        "against": against,
        "sample": None if sample is None else {"count": sample.count, "seed": sample.seed},
        "logical_digest": verdict.logical,
        "problems": list(verdict.problems),
        "warnings": list(verdict.warnings),
        "bytes_checked": verdict.bytes_checked,
        "bytes_total": verdict.bytes_total,
    }


def verdict_text(artifact: Path, verdict: Verdict, against: str | None, sample: Sample | None) -> str:
    """The outcome, what share of the artifact it speaks of, and the logical digests."""
    if not verdict.ok:
        lines = [f"{artifact}: {len(verdict.problems)} problems"]
    else:
        share = proof = ""
        if sample is not None:
            percent = 100 * verdict.bytes_checked / max(1, verdict.bytes_total)
            share = f": {sample.count} tensors of every rank by seed {sample.seed}, {percent:.1f} % of all bytes"
        if against is not None:
            what = "every element" if sample is None else f"{sample.count} experts or tensors"
            proof = f", {what} equal to {against}"
        lines = [f"{artifact}: ok ({verdict.mode}{share}{proof})"]
    recorded = "" if verdict.ok and verdict.mode == "full" else " (as recorded)"
    return "\n".join([*lines, *(f"logical digest, {p}: {d}{recorded}" for p, d in verdict.logical.items())])
