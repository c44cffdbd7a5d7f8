"""probe, doctor: will it work here, before anything moves."""

import textwrap
from pathlib import Path
from typing import Any

import click

from convert.commands.common import checked, default_out, emit, mesh_options, workers_default
from convert.probe.line import Line, go
from specs.schema import archs

WIDTH = 120
INDENT = " " * 19
context_option = click.option(
    "--context",
    type=click.IntRange(min=1),
    default=None,
    help="Tokens that one rank must be able to cache.  [default: the model's own]",
    show_default=False,
)
memory_option = click.option(
    "--gpu-memory",
    type=click.FloatRange(min=1, max=4096),
    default=None,
    metavar="GB",
    help="What one card holds, in GB of 10^9 bytes.  [default: the card's]",
    show_default=False,
)


@click.command()
@click.argument("model")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Where the artifact would go.  [default: build/NAME/MESH]",
    show_default=False,
)
@context_option
@memory_option
@mesh_options
def probe(
    model: str,
    out: Path | None,
    context: int | None,
    gpu_memory: float | None,
    arch: str,
    world: int | None,
    tp: int,
    ep: int,
    draft: tuple[str, ...],
    workers: int | None,
    as_json: bool,
) -> None:
    """Ask whether MODEL can be converted and served, before anything moves. MODEL may be a draft too.

    Reads headers alone: of a hub id some 30 MB by byte range, never the weights. Every line says go, warn or no-go,
    what was found and what to do. Exit code 0 unless a line says no-go.
    """
    from convert.probe.probe import Question
    from convert.probe.probe import probe as ask

    mesh = checked(arch, world, tp, ep)
    question = Question(
        model=model,
        mesh=mesh,
        arch=arch,
        out=out or default_out(model, mesh),
        workers=workers or workers_default(),
        context=context,
        gpu_memory=gpu_memory,
        drafts=draft,
    )
    answer(ask(question), as_json, {"model": model, "mesh": str(mesh), "arch": arch})


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--arch", type=click.Choice(list(archs())), default=None, help="The GPU architecture it shall run on.")
@context_option
@memory_option
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def doctor(artifact: Path, arch: str | None, context: int | None, gpu_memory: float | None, as_json: bool) -> None:
    """Ask whether the finished ARTIFACT can be served from this machine.

    Looks at the seal, the files' sizes and headers, GPUs, memory, kernels (would anything compile at the start?),
    packages and disk. Exit code 0 unless a line says no-go.
    """
    from convert.probe.doctor import Patient, gpus_here
    from convert.probe.doctor import doctor as ask

    patient = Patient(artifact=artifact, gpus=gpus_here(), arch=arch, context=context, gpu_memory=gpu_memory)
    answer(ask(patient), as_json, {"artifact": str(artifact)})


def answer(lines: list[Line], as_json: bool, about: dict[str, Any]) -> None:
    """Prints the lines and ends with exit code 1 for a no-go."""
    ready = go(lines)
    asked = [line for line in lines if "after" not in line.facts]
    stopped = sum(line.verdict == "no-go" for line in asked)
    warned = sum(line.verdict == "warn" for line in asked)
    last = f"go, with {warned} to look at" if ready and warned else "go" if ready else f"no-go for {stopped} reasons"
    facts = {**about, "go": ready, "lines": [line.record() for line in lines]}
    emit(as_json, facts, "\n".join([*map(shown, asked), *unanswered(lines), "", last]))
    if not ready:
        raise click.exceptions.Exit(1)


def unanswered(lines: list[Line]) -> list[str]:
    """One paragraph for all that was not asked."""
    names = [line.name for line in lines if "after" in line.facts]
    return [_filled("no-go", "not asked", ", ".join(names) + ": settle the above first")] if names else []


def shown(line: Line) -> str:
    """A line and, below it, what to do."""
    text = _filled(line.verdict, line.name, line.found)
    return f"{text}\n{INDENT}-> {line.do}" if line.do else text


def _filled(verdict: str, name: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{verdict:<6} {name:<12}", subsequent_indent=INDENT)
