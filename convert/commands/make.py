"""demo, plan, convert: from a checkpoint to an artifact."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from convert.commands.common import DEMO, checked, default_out, emit, make_plan, mesh_options, program, workers_default
from convert.commands.draft import draft_facts, draft_text, reports_facts, reports_texts, write_drafts

if TYPE_CHECKING:
    from convert.drafts import Draft
    from convert.readers.source import Source
    from convert.shard.plan import Plan

TEXT_ONLY = click.option("--text-only", is_flag=True, help="Leave the vision tower and projector out.")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--random", is_flag=True, help="Random weights of the tiny geometry instead of the trained ones.")
@click.option("--geometry", type=click.Choice(["tiny", "k2.6"]), default="tiny", help="Sizes of a random model.")
@click.option("--layers", type=click.IntRange(1, 61), default=None, help="Full-size layers to write (k2.6 only).")
@click.option("--seed", type=int, default=0, help="Seed of the random weights.")
@click.option(
    "--drafts", is_flag=True, help="Beside a random model: a random draft of each kind that fits, in OUT-drafts."
)
def demo(out: Path, random: bool, geometry: str, layers: int | None, seed: int, drafts: bool) -> None:
    """Write a small checkpoint in the real format to OUT: the trained one, with its drafts in OUT-drafts.

    With --random the weights are drawn, a few megabytes with tokenizer and chat template. k2.6 writes full-size
    layers of random words for benches: layer 0 is dense (1 GB), every further one is a mixture of experts (9.8 GB),
    and 5.6 GB are embedding, head and vision tower.
    """
    from convert.demo.checkpoint import write_demo
    from convert.demo.drafts import DRAFT_KINDS, write_draft
    from convert.demo.geometry import TINY, k26
    from convert.demo.shipped import write_shipped

    if (geometry == "k2.6") != (layers is not None):
        raise click.UsageError("--layers goes with --geometry k2.6 and is needed there")
    if drafts and layers is None and not random:
        raise click.UsageError("--drafts goes with --random or --geometry k2.6; the trained model's are always written")
    if layers is None and not random:
        write_shipped(out)
    else:
        sizes = TINY if layers is None else k26(layers)
        write_demo(out, sizes, seed=seed)
        for kind in DRAFT_KINDS if drafts else ():
            folder = out.with_name(f"{out.name}-drafts") / kind
            write_draft(folder, kind, sizes, seed)
            click.echo(f"wrote {folder}")
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
    from convert.drafts import all_asked, prepared
    from convert.readers.find import find
    from convert.tables import plan_facts, plan_text

    mesh = checked(arch, world, tp, ep)
    source = find(model, headers_only=True)
    made = make_plan(source, mesh, arch, text_only)
    drafts = prepared(all_asked(draft, model), made, headers_only=True)
    facts = plan_facts(made, workers or workers_default(), source.identity.record())
    text = plan_text(made, facts, shutil.disk_usage(".").free)
    facts |= {"drafts": {d.name: draft_facts(d) for d in drafts}}
    emit(as_json, facts, "\n".join([text, *map(draft_text, drafts)]))


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

    MODEL may be an artifact for another mesh; its drafts are then cut again too. Of a hub id the headers are checked
    before anything is downloaded. Each --draft goes to draft/NAME of the artifact; `kiln draft` adds one later.
    Without MODEL, what `kiln demo` writes goes to build/demo and is converted. An interrupted conversion goes on where
    it stopped when the same command runs again.

    With --part 1/4 to 4/4 four processes or hosts share the work: each takes parts of the artifact that nobody has,
    and the last one seals it. A part that was killed is started again, or left to the others.
    """
    from convert.pipeline import convert as run
    from convert.pipeline import job_bytes, missing_side_files
    from convert.progress import Progress
    from convert.tables import report_facts, report_text

    mesh = checked(arch, world, tp, ep)
    if model is None:
        model = DEMO
        ensure_demo(Path(model))
    if stream and (part is not None or Path(model).exists()):
        raise click.UsageError("--stream reads a hub id in one process; leave it out for a folder, and for --part")
    source, made, drafts = opened(model, draft, stream, lambda s: make_plan(s, mesh, arch, text_only, ranks))
    out, count = out or default_out(model, mesh), workers or workers_default()
    for line in [*made.config.warnings, *missing_side_files(source.path)]:
        click.echo(f"warning: {line}", err=True)
    with Progress("convert", sum(map(job_bytes, made.jobs))) as progress:
        report = run(made, source, out, count, progress, command=shlex.join(["kiln", *sys.argv[1:]]), part=part)
    for line in report.warnings:
        click.echo(f"warning: {line}", err=True)
    written = [] if report.waiting else write_drafts(drafts, out, count, part)
    following = (
        f"next: {program('kiln-run')} generate {shlex.quote(str(out))} --device cpu --prompt Hello --max-tokens 32"
    )
    shown = report_text(report, count)
    facts = {**report_facts(report, count), "drafts": reports_facts(drafts, written, count)}
    shown = "\n\n".join([shown, *reports_texts(drafts, written, count), *([] if report.waiting else [following])])
    emit(as_json, facts, shown)


def opened(
    model: str, draft: tuple[str, ...], stream: bool, make: Callable[[Source], Plan]
) -> tuple[Source, Plan, list[Draft]]:
    """MODEL, its plan and its drafts; what can be refused by headers is refused before anything is downloaded."""
    from convert.drafts import all_asked, prepared
    from convert.readers.find import find

    remote = not stream and not Path(model).exists()
    source = find(model, headers_only=remote, stream=stream)
    made = make(source)
    drafts = prepared(all_asked(draft, model), made)
    if remote:
        source = find(model)
        made = make(source)
    return source, made, drafts


def ensure_demo(path: Path) -> None:
    """Writes the embedded demo checkpoint unless it is there."""
    from convert.demo.shipped import write_shipped

    if not (path / "config.json").exists():
        click.echo(f"no MODEL given: writing the embedded checkpoint to {path}", err=True)
        write_shipped(path)
