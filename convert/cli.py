"""kiln: checkpoint in, proven artifact out. This file parses, calls and prints; it decides nothing else."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specs.errors import CutError, InputError
from specs.mesh import Mesh
from specs.schema import archs

DEMO = "build/demo/checkpoint"
LATER = {"draft": "--draft: drafts cannot be converted yet; leave it out"}


class Kiln(click.Group):
    """Wrong input ends with its problems on stderr and exit code 1, wrong usage with 2, never with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as e:
            for line in e.lines():
                click.echo(f"error: {line}", err=True)
        except BrokenPipeError:
            raise
        except OSError as e:
            click.echo(f"error: {e.filename or ''}: {e.strerror or e}", err=True)
        raise click.exceptions.Exit(1)


@click.group(cls=Kiln, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="kiln", prog_name="kiln")
def main() -> None:
    """Turn a Kimi K2.6 checkpoint into an artifact that a GPU node can serve from at once.

    \b
    kiln plan moonshotai/Kimi-K2.6 --tp 8      what would be written, from headers alone
    kiln convert CHECKPOINT --tp 8 --out DIR   write it, resume it, seal it
    kiln verify DIR --against CHECKPOINT       prove it, bit for bit

    Exit codes: 0 done, 1 the input or artifact is wrong, 2 wrong usage.
    """


def workers_default() -> int:
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16)


def mesh_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        [
            click.option("--arch", default="sm90", help="GPU architecture to prepare for: " + ", ".join(archs()) + "."),
            click.option(
                "--world", type=int, default=None, help="Ranks (GPUs) in all.  [default: tp]", show_default=False
            ),
            click.option("--tp", type=int, default=8, help="Ranks that share one copy of the dense tensors."),
            click.option("--ep", type=int, default=1, help="Groups that the routed experts are shared out to."),
            click.option("--draft", multiple=True, help="A speculative draft to convert along."),
            click.option(
                "--workers",
                type=click.IntRange(1, 256),
                default=None,
                help="Worker threads.  [default: cores, at most 16]",
                show_default=False,
            ),
            click.option(
                "--json", "as_json", is_flag=True, help="Machine-readable result on stdout, all else on stderr."
            ),
        ]
    ):
        command = option(command)
    return command


def checked(arch: str, world: int | None, tp: int, ep: int, draft: tuple[str, ...]) -> Mesh:
    """The mesh of the flags; a UsageError for what no model could satisfy."""
    if draft:
        raise click.UsageError(LATER["draft"])
    known = archs()
    if arch not in known:
        raise click.UsageError(f"--arch: found {arch!r}, known are {', '.join(known)}")
    try:
        return Mesh(world=tp if world is None else world, tp=tp, ep=ep)
    except CutError as e:
        raise click.UsageError("; ".join(e.problems)) from e


def emit(as_json: bool, facts: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(facts, indent=1) if as_json else text)


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--geometry", type=click.Choice(["tiny", "k2.6"]), default="tiny", help="Sizes of the model.")
@click.option("--layers", type=click.IntRange(1, 61), default=None, help="Full-size layers to write (k2.6 only).")
@click.option("--seed", type=int, default=0, help="Seed of the random weights.")
def demo(out: Path, geometry: str, layers: int | None, seed: int) -> None:
    """Write a random checkpoint in the real format to OUT.

    tiny is a few megabytes with tokenizer and chat template. k2.6 writes full-size layers of random words for
    benches: layer 0 is dense (1 GB), every further one is a mixture of experts (9.8 GB), and 5.6 GB are embedding,
    head and vision tower.
    """
    from convert.demo.checkpoint import write_demo
    from convert.demo.geometry import TINY, k26

    if (geometry == "k2.6") != (layers is not None):
        raise click.UsageError("--layers goes with --geometry k2.6 and is needed there")
    write_demo(out, TINY if layers is None else k26(layers), seed=seed)
    click.echo(f"wrote {out}; next: kiln convert {shlex.quote(str(out))} --tp 8 --out {shlex.quote(str(out) + '-tp8')}")


@main.command()
@click.argument("model")
@mesh_options
def plan(
    model: str,
    arch: str,
    world: int | None,
    tp: int,
    ep: int,
    draft: tuple[str, ...],
    workers: int | None,
    as_json: bool,
) -> None:
    """Show what a conversion of MODEL would write, from its headers alone.

    MODEL is a checkpoint folder, an artifact folder, or a hub id like moonshotai/Kimi-K2.6@main.
    """
    from convert.readers.find import find
    from convert.tables import plan_facts, plan_text

    mesh = checked(arch, world, tp, ep, draft)
    source = find(model, headers_only=True)
    made = make_plan(source, mesh, arch)
    facts = plan_facts(made, workers or workers_default(), source.identity.record())
    emit(as_json, facts, plan_text(made, facts, shutil.disk_usage(".").free))


@main.command()
@click.argument("model", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Artifact folder.  [default: build/NAME/MESH]",
    show_default=False,
)
@mesh_options
def convert(
    model: str | None,
    out: Path | None,
    arch: str,
    world: int | None,
    tp: int,
    ep: int,
    draft: tuple[str, ...],
    workers: int | None,
    as_json: bool,
) -> None:
    """Convert MODEL into an artifact for one mesh of GPUs.

    Without MODEL, a small random checkpoint is written to build/demo and converted. An interrupted conversion goes
    on where it stopped when the same command runs again.
    """
    from convert.pipeline import convert as run
    from convert.pipeline import job_bytes, missing_side_files
    from convert.progress import Progress
    from convert.readers.find import find
    from convert.tables import report_facts, report_text

    mesh = checked(arch, world, tp, ep, draft)
    if model is None:
        model = DEMO
        ensure_demo(Path(model))
    source = find(model)
    made = make_plan(source, mesh, arch)
    out = out or default_out(model, mesh)
    count = workers or workers_default()
    for line in [*made.config.warnings, *missing_side_files(source.path)]:
        click.echo(f"warning: {line}", err=True)
    with Progress("convert", sum(map(job_bytes, made.jobs))) as progress:
        report = run(made, source, out, count, progress, command=shlex.join(["kiln", *sys.argv[1:]]))
    for line in report.warnings:
        click.echo(f"warning: {line}", err=True)
    following = (
        f"next: {program('kiln-run')} generate {shlex.quote(str(out))} --device cpu --prompt Hello --max-tokens 32"
    )
    emit(as_json, report_facts(report, count), f"{report_text(report, count)}\n\n{following}")


def program(name: str) -> str:
    """How a user types one of our programs: by name, or by path while the environment is not activated."""
    if shutil.which(name):
        return name
    return shlex.quote(os.path.relpath(Path(sys.executable).with_name(name)))


def ensure_demo(path: Path) -> None:
    """Writes the embedded demo checkpoint unless it is there."""
    from convert.demo.checkpoint import write_demo
    from convert.demo.geometry import TINY

    if not (path / "config.json").exists():
        click.echo(f"no MODEL given: writing a small random checkpoint to {path}", err=True)
        write_demo(path, TINY)


def default_out(model: str, mesh: Mesh) -> Path:
    name = Path(model.split("@")[0]).name
    return Path("build") / ("demo" if model == DEMO else name) / str(mesh)


def make_plan(source: Any, mesh: Mesh, arch: str) -> Any:
    """The plan for a source, with every layout readable on the architecture."""
    from convert.shard.plan import plan as make
    from specs.config import read_config
    from specs.schema import load

    made = make(load("kimi_k2_6"), read_config(source.config), source.header, mesh)
    needed = {w.form.layout for f in made.files for w in f.work}
    unreadable = sorted(needed - set(archs()[arch]["layouts"]))
    if unreadable:
        raise InputError(f"--arch {arch}: no kernels there read the layouts {', '.join(unreadable)}")
    return made


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def inspect(artifact: Path, as_json: bool) -> None:
    """Show what ARTIFACT is: from which source, for which mesh, in which layouts, how large.

    Reads the manifest alone; `kiln verify` tells whether the files still are what it says.
    """
    from convert.pipeline import PROVENANCE
    from convert.tables import inspect_facts, inspect_text
    from specs import manifest

    sealed = manifest.read(artifact)
    provenance = manifest.read_json(artifact / PROVENANCE) if (artifact / PROVENANCE).exists() else {}
    facts = inspect_facts(artifact, sealed, provenance)
    emit(as_json, facts, inspect_text(facts))


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--quick", is_flag=True, help="Only sizes, headers and the manifest; seconds.")
@click.option(
    "--against", default=None, metavar="MODEL", help="Compare every element with this checkpoint or artifact."
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=None,
    help="Worker threads.  [default: cores, at most 16]",
    show_default=False,
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout, all else on stderr.")
def verify(artifact: Path, quick: bool, against: str | None, workers: int | None, as_json: bool) -> None:
    """Check ARTIFACT: every file's sha256, and the logical digest by unpacking every tensor.

    The logical digest speaks of the source's tensors: it is the same for every artifact made from one checkpoint,
    whatever the mesh.
    """
    from convert.progress import Progress
    from convert.readers.find import find
    from convert.repack.verify import verify as run
    from specs import manifest

    if quick and against is not None:
        raise click.UsageError("--quick reads no tensor, --against all of them; choose one")
    source = find(against) if against is not None else None
    sealed = manifest.read(artifact)
    total = 0 if quick else sum(f["size"] for f in sealed["files"]) + sealed["source"]["bytes"]
    with Progress("verify", total) as progress:
        verdict = run(artifact, "quick" if quick else "full", source, workers or workers_default(), progress)
    facts = {
        "ok": verdict.ok,
        "mode": verdict.mode,
        "against": against,
        "logical_digest": verdict.logical,
        "problems": list(verdict.problems),
        "warnings": list(verdict.warnings),
        "bytes_checked": verdict.bytes_checked,
    }
    for line in verdict.warnings:
        click.echo(f"warning: {line}", err=True)
    if not verdict.ok:
        for line in InputError(verdict.problems).lines():
            click.echo(f"error: {line}", err=True)
    proof = f", every element equal to {against}" if against else ""
    lines = [
        f"{artifact}: ok ({verdict.mode}{proof})" if verdict.ok else f"{artifact}: {len(verdict.problems)} problems"
    ]
    recorded = " (as recorded)" if quick or not verdict.ok else ""
    lines += [f"logical digest, {part}: {digest}{recorded}" for part, digest in verdict.logical.items()]
    emit(as_json, facts, "\n".join(lines))
    if not verdict.ok:
        raise click.exceptions.Exit(1)
