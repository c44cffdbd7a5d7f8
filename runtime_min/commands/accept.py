"""kiln-run accept: the day-one kit, run on an artifact of the real checkpoint."""

from dataclasses import replace
from pathlib import Path

import click

from runtime_min.accept import report, text
from runtime_min.accept.report import Finding
from runtime_min.artifact import Artifact
from runtime_min.commands.options import limit_options, run_options
from runtime_min.commands.serve import need
from runtime_min.launch import Run, launch
from runtime_min.request import Limits
from runtime_min.tasks import doctor_task

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@run_options
@limit_options
@click.option("--release", type=click.Choice(["k2.6", "none"]), default="k2.6", help="Whose files these should be.")
@click.option("--text", "prose", type=FILE, default=None, help="Text for the perplexity.")
@click.option("--perplexity", type=(float, float), default=(1.0, 10.0), help="What it may be: LOW HIGH.")
@click.option(
    "--requests",
    type=FILE,
    default=None,
    help="JSON lines: requests of /v1/chat/completions, each with expected_calls, the names of the tools to call.",
)
@click.option("--f1", type=click.FloatRange(0, 1), default=0.73, help="Least F1 of the decision to call a tool.")
@click.option("--schema", type=click.FloatRange(0, 1), default=0.95, help="Least share of calls that keep to schema.")
@click.option("--prompts", type=FILE, default=None, help="Prompts, one a line, for the acceptance of --draft.")
@click.option("--length", type=click.FloatRange(1), default=1.5, help="Least mean accept length of --draft.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("accept"), help="Folder for accept.md, accept.json."
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def accept(
    artifact: Path, run: Run, limits: Limits, release: str, prose: Path | None, perplexity: tuple[float, float],
    requests: Path | None, f1: float, schema: float, prompts: Path | None, length: float, out: Path, as_json: bool,
) -> None:  # fmt: skip
    """Check ARTIFACT against the release and by what it says: kernels, files, prompts, perplexity, tool calls.

    What no file was given for is skipped, and the report says so. Exit code 1 if anything failed.
    """
    need("accept", "accept")
    findings = [_doctor(run)]
    if release == "none":
        findings.append(Finding(name="digests", verdict="skipped", said="--release none"))
    else:
        findings.append(text.digests(artifact))
    findings.append(text.renderings(artifact))
    findings += _measured(run, limits, prose, perplexity, requests, (f1, schema), prompts, length)
    page, data = report.write(out, str(artifact), findings)
    if as_json:
        click.echo(data.read_text())
    else:
        click.echo("\n".join([*(f"{f.verdict:8} {f.name}: {f.said}" for f in findings), f"report: {page}, {data}"]))
    if any(f.verdict == "fail" for f in findings):
        raise click.exceptions.Exit(1)


def _doctor(run: Run) -> Finding:
    """Every kernel against its definition, as `kiln-run doctor` does."""
    found = launch(replace(run, check=False), doctor_task, None)
    worst = max((row["error"] / row["bound"] for row in found["ops"]), default=0.0)
    said = f"{found['launcher']}: {len(found['ops'])} ops, the largest error {worst:.2f} of what is allowed"
    return Finding(name="kernels", verdict="pass" if found["ok"] else "fail", said=said, facts=found)


def _measured(
    run: Run, limits: Limits, prose: Path | None, bounds: tuple[float, float], requests: Path | None,
    least: tuple[float, float], prompts: Path | None, length: float,
) -> list[Finding]:  # fmt: skip
    """What needs the model running: once for all."""
    prompts = prompts if limits.draft is not None else None
    skipped = {
        "perplexity": (prose, "--text"), "tool calls": (requests, "--requests"),
        "drafts": (prompts, "--draft with --prompts"),
    }  # fmt: skip
    out = [
        Finding(name=name, verdict="skipped", said=f"no {option}")
        for name, (file, option) in skipped.items()
        if file is None
    ]
    if len(out) == len(skipped):
        return out
    from runtime_min.accept import measure
    from runtime_min.engine import Engine
    from runtime_min.serve import start

    opened = Artifact.open(run.artifact, verify=False)
    with Engine(run.artifact, limits, **run.how) as engine:
        what = start.served(opened, engine.bounds)
        if prose is not None:
            out.append(measure.perplexity(engine, what, prose, *bounds))
        if requests is not None:
            out.append(measure.tool_calls(engine, what, requests, *least))
        if prompts is not None:
            out.append(measure.drafts(engine, opened, prompts, length))
    return out
