"""kiln-run tune and kiln-run bench: kernels timed on this machine's GPU."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from runtime_min.artifact import Artifact
from runtime_min.kernels import tuning
from runtime_min.kernels.cubin import arch_here
from runtime_min.kernels.index import KernelError
from specs import manifest
from specs.config import read_config
from specs.dims import TextDims, VisionDims
from specs.mesh import Mesh

TIMED = ("linear", "mla_decode", "mla_prefill", "moe_int4", "moe_route", "rmsnorm", "rope_cache", "silu_mul")
OPS = (*TIMED, "vit_attn")


def op_option(ops: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--op", "ops", type=click.Choice(ops), multiple=True, help="Only this op; repeatable.")


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--ep", default=1, help="Expert-parallel groups, with a config.json."),
        click.option("--tp", default=1, help="Tensor-parallel ranks, with a config.json."),
        click.option("--world", default=None, type=int, help="Ranks, with a config.json.  [default: TP]"),
        click.argument("model", type=click.Path(path_type=Path, exists=True)),
    ):
        command = option(command)
    return command


Sizes = tuple[TextDims, VisionDims | None, Mesh, str]


def sizes(model: Path, world: int | None, tp: int, ep: int) -> Sizes:
    """Sizes of text and vision, mesh and, of an artifact, the digest of its weights. MODEL: an artifact, or a
    config.json."""
    if model.is_dir():
        artifact = Artifact.open(model, 0, verify=False)
        vision = artifact.config.vision if artifact.has_vision else None
        return artifact.config.text, vision, artifact.mesh, str(artifact.manifest["digest"])
    config = read_config(manifest.read_json(model))
    return config.text, config.vision, Mesh(world=world or tp, tp=tp, ep=ep), ""


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise KernelError("no GPU is here, and nothing else tells how fast a kernel is on one")


def bar(what: str) -> tuple[Any, Callable[[int, int, str], None]]:
    """A progress bar on stderr, and what moves it."""
    shown = tqdm(desc=what, unit="case", file=sys.stderr, dynamic_ncols=True)

    def progress(done: int, total: int, now: str) -> None:
        shown.total = total
        shown.set_postfix_str(now)
        shown.update(done - shown.n)

    return shown, progress


@click.command()
@model_options
@op_option(OPS)
@click.option("--budget", type=float, default=0.0, help="Stop after MINUTES; the next run goes on.  [default: never]")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Table.  [default: MODEL/tuning/DEVICE.json]"
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def tune(
    model: Path, world: int | None, tp: int, ep: int, ops: tuple[str, ...], budget: float, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Time every candidate of every kernel that MODEL (an artifact, or a config.json) launches, and keep the fastest.

    Every candidate is compared with the definition first. All timings go to a journal beside the table; what is in it
    is not done again, so a run may be stopped at any time, and a new shape costs only itself. Then compile: cubins are
    made for what the table can choose.
    """
    from runtime_min.kernels.tune import Tuning, journal
    from runtime_min.kernels.tune import tune as run

    need_gpu()
    dims, vision, mesh, weights = sizes(model, world, tp, ep)
    if out is None and not model.is_dir():
        raise click.UsageError("--out is needed with a config.json")
    path = out or model / "tuning" / f"{tuning.slug(torch.cuda.get_device_name())}.json"
    weights = weights if out is None else ""
    shown, progress = bar("tune")
    with shown:
        wish = Tuning(dims=dims, vision=vision, mesh=mesh, out=path, ops=ops, minutes=budget, weights=weights)
        done, left = run(wish, progress)
    facts = {"table": str(path), "timings": str(journal(path)), "cases": done, "left": left}
    rest = f"{left} left; run the same command again" if left else "all done"
    then = f"\nnext: kiln-run compile {model} --arch {arch_here()}" if model.is_dir() and not left else ""
    click.echo(json.dumps(facts) if as_json else f"{path}: {done} problems, {rest}{then}")


@click.group()
def bench() -> None:
    """Measure this machine: kernels against the physical limit and against other implementations."""


@bench.command()
@model_options
@op_option(TIMED)
@click.option("--peer", "peers", default="torch", help="Others to time in the same run: torch, humming.")
@click.option("--bandwidth", default=4650.0, help="GB/s that the card reads at best.")
@click.option("--rate", default=795.0, help="TFLOP/s that the card multiplies in bf16 at best.")
@click.option("--result", type=click.Path(path_type=Path), default=None, help="Write NAME.json and NAME.md.")
@click.option("--plot", type=click.Path(path_type=Path), default=None, help="Draw a roofline (SVG).")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout.")
def kernels(
    model: Path, world: int | None, tp: int, ep: int, ops: tuple[str, ...], peers: str, bandwidth: float, rate: float,
    result: Path | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Microseconds of every op of MODEL (an artifact, or a config.json) beside its limit and its peers.

    A result that is not what the definition says ends the bench: a wrong kernel has no speed.
    """
    from runtime_min.bench import kernels as bench
    from runtime_min.bench.report import write

    need_gpu()
    dims, _, mesh, _ = sizes(model, world, tp, ep)
    named = tuple(p for p in peers.split(",") if p)
    wish = bench.Wish(dims=dims, mesh=mesh, ops=ops, peers=named, gb_s=bandwidth, tflops=rate)
    shown, progress = bar("bench")
    with shown:
        rows = bench.bench(wish, progress)
    told = bench.facts(wish)
    found, text = [asdict(r) for r in rows], bench.table(rows, told)
    click.echo(json.dumps({"facts": told, "rows": found}) if as_json else text)
    if result is not None:
        write(result, text, told, found)
    if plot is not None:
        bench.plot(rows, told, plot, bandwidth, rate)
