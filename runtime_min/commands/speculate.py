"""kiln-run bench spec: what a draft brings on given prompts."""

import json
from pathlib import Path
from typing import Any

import click

from runtime_min.artifact import Artifact
from runtime_min.commands.options import limit_options, run_options
from runtime_min.launch import Run
from runtime_min.request import Limits
from runtime_min.sample import Sampling


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@run_options
@limit_options
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    required=True,
    help="A prompt on each line: a user's message, or token ids as a JSON list.",
)
@click.option("--max-tokens", type=click.IntRange(2), default=256, help="Of each answer.")
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0)
@click.option("--seed", type=int, default=0)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def spec(
    artifact: Path, run: Run, limits: Limits, prompts: Path, max_tokens: int, temperature: float, top_p: float,
    seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Acceptance, cost and speed-up of ARTIFACT's --draft on real prompts, against plain decoding in the same run."""
    from runtime_min.bench import speculate
    from runtime_min.engine import Engine

    if limits.draft is None:
        raise click.UsageError("--draft is needed")
    opened = Artifact.open(artifact, verify=False)
    given = speculate.prompts_of(prompts, opened)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    with Engine(artifact, limits, **run.how) as engine:
        found = speculate.measured(engine, opened, given, sampling, max_tokens)
    setting: dict[str, Any] = {
        "artifact": str(artifact), "draft": limits.draft, "tokens in a row": limits.spec_tokens or "default",
        "tree": limits.spec_tree or "none", "adaptive": limits.spec_adaptive, "temperature": temperature,
        "top_p": top_p, "requests at once": limits.running, "prompts": str(prompts),
    }  # fmt: skip
    click.echo(json.dumps({"setting": setting, **found.facts()}) if as_json else speculate.table(found, setting))
