"""demo, plan, convert: from a checkpoint to an artifact."""

import shlex
import shutil
import sys
from pathlib import Path

import click

from convert.commands.common import DEMO, checked, default_out, emit, make_plan, mesh_options, program, workers_default

TEXT_ONLY = click.option("--text-only", is_flag=True, help="Leave the vision tower and projector out.")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--random", is_flag=True, help="Random weights of the tiny geometry instead of the trained ones.")
@click.option("--geometry", type=click.Choice(["tiny", "k2.6"]), default="tiny", help="Sizes of a random model.")
@click.option("--layers", type=click.IntRange(1, 61), default=None, help="Full-size layers to write (k2.6 only).")
@click.option("--seed", type=int, default=0, help="Seed of the random weights.")
def demo(out: Path, random: bool, geometry: str, layers: int | None, seed: int) -> None:
    """Write a small trained checkpoint in the real format to OUT, and its speculative drafts to OUT-drafts.

    With --random the weights are drawn, a few megabytes with tokenizer and chat template. k2.6 writes full-size
    layers of random words for benches: layer 0 is dense (1 GB), every further one is a mixture of experts (9.8 GB),
    and 5.6 GB are embedding, head and vision tower.
    """
    from convert.demo.checkpoint import write_demo
    from convert.demo.geometry import TINY, k26

    if (geometry == "k2.6") != (layers is not None):
        raise click.UsageError("--layers goes with --geometry k2.6 and is needed there")
    if layers is not None:
        write_demo(out, k26(layers), seed=seed)
    elif random:
        write_demo(out, TINY, seed=seed)
    else:
        write_embedded(out)
    click.echo(f"wrote {out}; next: kiln convert {shlex.quote(str(out))} --tp 8 --out {shlex.quote(str(out) + '-tp8')}")


@click.command()
@click.argument("model")
@mesh_options
@TEXT_ONLY
def plan(
    model: str,
    arch: str,
    world: int | None,
    tp: int,
    ep: int,
    draft: tuple[str, ...],
    workers: int | None,
    as_json: bool,
    text_only: bool,
) -> None:
    """Show what a conversion of MODEL would write, from its headers alone.

    MODEL is a checkpoint folder, an artifact folder, or a hub id like moonshotai/Kimi-K2.6@main.
    """
    from convert.readers.find import find
    from convert.tables import plan_facts, plan_text

    mesh = checked(arch, world, tp, ep, draft)
    source = find(model, headers_only=True)
    made = make_plan(source, mesh, arch, text_only)
    facts = plan_facts(made, workers or workers_default(), source.identity.record())
    emit(as_json, facts, plan_text(made, facts, shutil.disk_usage(".").free))


def listed(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """`0,3` -> (0, 3)."""
    try:
        return tuple(int(n) for n in value.split(",")) if value is not None else ()
    except ValueError as e:
        raise click.BadParameter(f"found {value!r}, expected ranks like 0,3") from e


def share(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """`2/4` -> (2, 4)."""
    if value is None:
        return None
    index, slash, count = value.partition("/")
    if not slash or not index.isdecimal() or not count.isdecimal() or not 1 <= int(index) <= int(count):
        raise click.BadParameter(f"found {value!r}, expected I/N with I from 1 to N, like 2/4")
    return int(index), int(count)


@click.command()
@click.argument("model", required=False)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Artifact folder.  [default: build/NAME/MESH]",
    show_default=False,
)
@click.option(
    "--stream",
    is_flag=True,
    help="Of a hub id: no local copy. Whole shards pass through OUT one after another, a few at a time, each checked "
    "against the hub's sha256 before it is read.",
)
@click.option(
    "--ranks",
    callback=listed,
    metavar="R,R",
    help="Write these ranks only. The result is sealed as a part: it serves them, and is no source.",
)
@click.option(
    "--part",
    callback=share,
    metavar="I/N",
    help="Be the I-th of N processes that share this conversion through one file system; each runs the same command.",
)
@mesh_options
@TEXT_ONLY
def convert(
    model: str | None,
    out: Path | None,
    stream: bool,
    ranks: tuple[int, ...],
    part: tuple[int, int] | None,
    arch: str,
    world: int | None,
    tp: int,
    ep: int,
    draft: tuple[str, ...],
    workers: int | None,
    as_json: bool,
    text_only: bool,
) -> None:
    """Convert MODEL into an artifact for one mesh of GPUs.

    MODEL may be an artifact for another mesh. Of a hub id the headers are checked before anything is downloaded.
    Without MODEL, the small trained checkpoint of this package is written to build/demo and converted. An interrupted
    conversion goes on where it stopped when the same command runs again.

    With --part 1/4 to 4/4 four processes or hosts share the work: each takes parts of the artifact that nobody has,
    and the last one seals it. A part that was killed is started again, or left to the others.
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
    if stream and (part is not None or Path(model).exists()):
        raise click.UsageError("--stream reads a hub id in one process; leave it out for a folder, and for --part")
    if not stream and not Path(model).exists():
        make_plan(find(model, headers_only=True), mesh, arch, text_only, ranks)
    source = find(model, stream=stream)
    made = make_plan(source, mesh, arch, text_only, ranks)
    out = out or default_out(model, mesh)
    count = workers or workers_default()
    for line in [*made.config.warnings, *missing_side_files(source.path)]:
        click.echo(f"warning: {line}", err=True)
    with Progress("convert", sum(map(job_bytes, made.jobs))) as progress:
        report = run(made, source, out, count, progress, command=shlex.join(["kiln", *sys.argv[1:]]), part=part)
    for line in report.warnings:
        click.echo(f"warning: {line}", err=True)
    following = (
        f"next: {program('kiln-run')} generate {shlex.quote(str(out))} --device cpu --prompt Hello --max-tokens 32"
    )
    shown = report_text(report, count)
    emit(as_json, report_facts(report, count), shown if report.waiting else f"{shown}\n\n{following}")


def ensure_demo(path: Path) -> None:
    """Writes the embedded demo checkpoint unless it is there."""
    if not (path / "config.json").exists():
        click.echo(f"no MODEL given: writing the embedded checkpoint to {path}", err=True)
        write_embedded(path)


def write_embedded(path: Path) -> None:
    """The trained checkpoint with its drafts; random weights, and a line that says so, where it is not installed."""
    from convert.demo import shipped
    from convert.demo.checkpoint import write_demo
    from convert.demo.geometry import TINY

    if shipped.there():
        shipped.write_shipped(path)
        return
    write_demo(path, TINY)
    click.echo("this installation has no trained weights: these are random", err=True)
