"""kiln-run: an artifact in, tokens or logits out. This file parses, calls and prints; it decides nothing else."""

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from runtime_min.commands import serve as serving
from runtime_min.commands.accept import accept
from runtime_min.commands.chat import chat
from runtime_min.commands.kernels import bench, tune
from runtime_min.commands.options import draft_options, limit_options, run_options
from runtime_min.commands.speculate import spec
from runtime_min.launch import Run, launch
from runtime_min.request import Limits
from runtime_min.tasks import Generation, Scoring, doctor_task, generate_task, score_task
from specs.errors import InputError
from specs.schema import archs

FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


class KilnRun(click.Group):
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


@click.group(cls=KilnRun, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="kiln", prog_name="kiln-run")
def main() -> None:
    """Run an artifact that `kiln convert` made.

    An artifact of N ranks runs by one command: on N GPUs if they are there, else as N processes on the CPU. torchrun
    works too: torchrun --nproc-per-node 8 -m runtime_min generate ARTIFACT ...

    Exit codes: 0 done, 1 the input or artifact is wrong, 2 wrong usage.
    """


def under_torchrun() -> tuple[int, int] | None:
    """(rank, world) that torchrun set, if it started this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@run_options
@click.option("--prompt", default=None, help="One user message.")
@click.option(
    "--messages",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=None,
    help="JSON file: a list of messages, or an object with messages, tools, thinking, preserve_thinking.",
)
@click.option("--image", "images", type=FILE, multiple=True, help="A picture before the prompt; may be repeated.")
@click.option("--video", "videos", type=FILE, multiple=True, help="A clip before the prompt; needs PyAV.")
@click.option("--media-root", type=FOLDER, default=None, help="Folder whose files --messages may name.")
@click.option("--ids", default=None, help="Token ids, comma-separated; needs no tokenizer.")
@click.option("--instant", is_flag=True, help="Answer without thinking first.")
@click.option("--max-tokens", type=click.IntRange(1), default=128)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0)
@click.option("--top-k", type=click.IntRange(0), default=0, help="0 is off.")
@click.option("--seed", type=int, default=0)
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end instead of streamed text.")
@draft_options
def generate(
    artifact: Path,
    run: Run,
    prompt: str | None,
    messages: Path | None,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    media_root: Path | None,
    ids: str | None,
    instant: bool,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    as_json: bool,
    drafts: dict[str, Any],
) -> None:
    """Generate from a prompt, with pictures if there are any, a conversation, or token ids; text streams to stdout."""
    if sum(x is not None for x in (prompt, messages, ids)) != 1:
        raise click.UsageError("give exactly one of --prompt, --messages and --ids")
    if (images or videos) and prompt is None:
        raise click.UsageError("--image and --video go with --prompt; --messages names its own")
    try:
        numbers = None if ids is None else tuple(int(i) for i in ids.split(","))
    except ValueError as e:
        raise click.UsageError(f"--ids: {e}; expected comma-separated integers") from e
    wanted = Generation(
        prompt=prompt,
        messages=messages,
        images=images,
        videos=videos,
        media_root=media_root,
        ids=numbers,
        thinking=not instant,
        tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stream=not as_json,
        drafts=drafts,
    )
    result = launch(run, generate_task, wanted, under_torchrun())
    if as_json and result is not None:
        click.echo(json.dumps(result))


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@run_options
@click.option(
    "--input",
    "source",
    type=click.Path(path_type=Path),
    required=True,
    help="safetensors with `ids` [B, T] int64; for pictures also `pixels` [P, 3, 14, 14] float32 and `grids` [N, 3] "
    "int64.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="safetensors with `logits` [B, T, V] float32."
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def score(
    artifact: Path,
    run: Run,
    source: Path,
    output: Path,
    as_json: bool,
) -> None:
    """Write the logits of every position of given token ids: how anyone checks parity."""
    result = launch(run, score_task, Scoring(source=source, output=output), under_torchrun())
    if result is not None:
        click.echo(json.dumps(result) if as_json else f"wrote {output}: logits {result['shape']} float32")


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--arch", default="sm90", help="GPU architectures, comma-separated: " + ", ".join(archs()) + ".")
@click.option("--workers", type=click.IntRange(1), default=None, help="Processes.  [default: cores]")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def compile(artifact: Path, arch: str, workers: int | None, as_json: bool) -> None:
    """Compile every kernel that ARTIFACT can launch, ahead of time and without a GPU, into its kernels/ARCH.

    Kernels are sealed apart from the weights; compiling again what is there and unharmed does nothing.
    """
    from runtime_min.kernels.compile import compile_artifact

    names = arch.split(",")
    unknown = sorted(set(names) - set(archs()))
    if unknown:
        raise click.UsageError(f"--arch: found {', '.join(unknown)}, known are {', '.join(archs())}")
    facts = []
    for name in names:
        with tqdm(desc=f"compile {name}", unit="kernel", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:

            def progress(done: int, total: int, bar: Any = bar) -> None:
                bar.total = total
                bar.update(done - bar.n)

            count, already = compile_artifact(artifact, name, workers or len(os.sched_getaffinity(0)), progress)
        facts.append({"arch": name, "kernels": count, "already_there": already})
    lines = [f"{f['arch']}: {f['kernels']} kernels{', already there' if f['already_there'] else ''}" for f in facts]
    lines += ["", f"next: {shlex.quote(sys.argv[0])} generate {shlex.quote(str(artifact))} --device cpu --prompt Hello"]
    click.echo(json.dumps({"artifact": str(artifact), "compiled": facts}) if as_json else "\n".join(lines))


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@run_options
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def doctor(
    artifact: Path,
    run: Run,
    as_json: bool,
) -> None:
    """Load ARTIFACT and compare every kernel it uses with its definition, on this device and at its sizes."""
    result = launch(replace(run, check=False), doctor_task, None, under_torchrun())
    if result is None:
        return
    told = "{op:14} {calls:4} calls  error {error:.1e}  allowed {bound:.0e}"
    rows = [told.format(**row) for row in result["ops"]]
    verdict = "all good" if result["ok"] else "WRONG"
    last = f"{result['launcher']}, {result['compiled']} compiled here: {result['seconds']:.1f} s, {verdict}"
    click.echo(json.dumps(result) if as_json else "\n".join([*rows, last]))
    if not result["ok"]:
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@run_options
@limit_options
@serving.options
def serve(
    artifact: Path, run: Run, limits: Limits, **given: Any,
) -> None:  # fmt: skip
    """Serve ARTIFACT over HTTP: OpenAI's chat and completions, a web page at /, metrics; ends in order on SIGTERM."""
    limits = replace(limits, grammars=serving.has_grammars())
    serving.run(run, limits, given)


main.add_command(accept)
main.add_command(chat)
main.add_command(tune)
bench.add_command(spec)
main.add_command(bench)
