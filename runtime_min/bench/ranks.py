"""Several ranks of one host: what sums between them cost, alone and in the engine's decode steps, and loading at once.

Starts its processes itself. Full-geometry layers with random weights made on the cards, from the same seed on every
rank, so that all route alike. What is measured is written after every row. Without GPUs the same runs over gloo with
the definitions, which times nothing of interest but is what the tests run.
"""

import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import click
import torch
import torch.multiprocessing as mp

from runtime_min import ranks
from runtime_min.about import driver
from runtime_min.bench.report import figure, grid, page, write
from runtime_min.bench.steps import Card, card_options
from runtime_min.bench.together import NONE, LoadRow, StepRow, SumRow, loads, steps, sums
from runtime_min.kernels.choose import chooser_here
from runtime_min.kernels.compile import recorded
from runtime_min.kernels.cubin import arch_here
from runtime_min.kernels.index import Compiled
from runtime_min.kernels.race import Race, Using
from runtime_min.kernels.record import Variant
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_dims, random
from runtime_min.ops import REF, Ops, triton_ops
from runtime_min.ranks import Ranks
from specs import manifest
from specs.config import read_config
from specs.dims import TextDims
from specs.mesh import Mesh

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Bytes that are left for workspace and graphs where layers are chosen by what fits.
RESERVE = 16 << 30
Kernels = dict[Variant, tuple[Compiled, bytes]]
Row = SumRow | StepRow | LoadRow
PARTS = {SumRow: "sum", StepRow: "step", LoadRow: "load"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank is told. batches: sequences of decode steps, each with `context` cached tokens."""

    dims: TextDims
    mesh: Mesh
    device: str
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    artifact: Path | None
    rounds: int
    card: Card
    result: Path | None
    facts: dict[str, str]


def builder(plan: Plan, kernels: Kernels, device: torch.device) -> Callable[[Ranks], Decoder]:
    """What makes the model among given ranks, over one set of weights."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    weights = of_dims(plan.dims, plan.mesh, random(device), dtype)
    how = Settings(dtype=dtype, device=device, positions=plan.context)
    ops = REF if device.type == "cpu" else _ops(kernels)
    return lambda group: Decoder(plan.dims, weights, ops, group, how)


def _ops(kernels: Kernels) -> Ops:
    """Kernels that the process compiled that started this one."""
    race = Race(arch_here(), chooser_here(), 1)
    for key, made in kernels.items():
        race.made[key] = Future()
        race.made[key].set_result(made)
    return triton_ops(Using(race))


def compiled(dims: TextDims, mesh: Mesh) -> Kernels:
    """Every kernel of a rank, compiled by all cores at once."""
    choose, small = chooser_here(), replace(dims, layers=2, dense_layers=1)
    shapes = of_dims(small, mesh, meta, torch.bfloat16)
    with Race(arch_here(), choose, len(os.sched_getaffinity(0))) as race:
        race.ahead(recorded(small, mesh, shapes, torch.bfloat16, choose).variants)
        return {key: made.result() for key, made in race.made.items()}


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fitting(dims: TextDims, mesh: Mesh, tokens: int, room: int) -> int:
    """The most layers whose weights and cache for `tokens` tokens fit in `room` bytes; at least one of each kind."""

    def size(layers: int) -> int:
        made = of_dims(replace(dims, layers=layers), mesh, meta, torch.bfloat16).values()
        return sum(s.tensor.nbytes for s in made) + 2 * tokens * layers * dims.kv_a

    least = min(dims.layers, dims.dense_layers + 1)
    return next((n for n in range(dims.layers, least, -1) if size(n) <= room), least)


def bench(plan: Plan, kernels: Kernels, group: Ranks, device: torch.device) -> Iterator[Row]:
    yield from sums(group, plan.tokens, plan.dims.hidden, device, torch.bfloat16)
    if plan.artifact is not None:
        yield from loads(plan.artifact, group, plan.rounds, device)
    yield from steps(builder(plan, kernels, device), group, plan.batches, plan.context, plan.card)


def work(rank: int, plan: Plan, kernels: Kernels, init: str) -> None:
    """One rank; rank 0 writes."""
    device = torch.device(plan.device, rank) if plan.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = ranks.join(plan.mesh, rank, plan.mesh.world, device, init, "auto")
    facts, rows = plan.facts | {"sums": group.sums}, list[Row]()
    try:
        for row in bench(plan, kernels, group, device):
            rows.append(row)
            if rank == 0:
                click.echo(str(row), err=True)
                leave(plan.result, rows, facts)
        if rank == 0:
            click.echo(table(rows, facts))
            if plan.result is not None:
                plot(rows, facts, plan.result.with_suffix(".svg"))
    finally:
        ranks.leave()


def leave(result: Path | None, rows: Sequence[Row], facts: dict[str, str]) -> None:
    """NAME.md and NAME.json."""
    if result is not None:
        write(result, table(rows, facts), facts, [{"part": PARTS[type(r)], **asdict(r)} for r in rows])


def table(rows: Sequence[Row], facts: dict[str, str]) -> str:
    """Markdown of as many rows as there are."""
    added = [r for r in rows if isinstance(r, SumRow)]
    hows = list(dict.fromkeys(r.how for r in added))
    lines = ["One sum of [tokens, hidden] in bf16 alone, in us:", ""]
    found = {(r.tokens, r.how): r for r in added}
    by_tokens = [[r for r in added if r.tokens == t] for t in dict.fromkeys(r.tokens for r in added)]
    lines += grid(
        ("tokens", "KiB", *hows),
        (
            (str(rs[0].tokens), f"{rs[0].bytes / 1024:.0f}", *(f"{found[rs[0].tokens, r.how].us:.1f}" for r in rs))
            for rs in by_tokens
            if len(rs) == len(hows)
        ),
    )
    stepped = [r for r in rows if isinstance(r, StepRow)]
    if stepped:
        head = ("sums", "batch", "context", "ms a step", "on the card", "ms for bytes", "communication")
        lines += ["", "Decode steps of the engine; communication: share of the step that is gone without it.", ""]
        lines += grid(head, (_step(r, stepped) for r in stepped), words=1)
    loaded = [r for r in rows if isinstance(r, LoadRow)]
    if loaded:
        lines += ["", "All ranks load their parts at once:", ""]
        lines += grid(("pages", "slowest s", "fastest s", "spread", "GB", "GB/s of all"), map(_load, loaded), words=1)
    return page(f"{facts['ranks']} ranks of one host", facts, lines)


def share(r: StepRow, rows: Sequence[StepRow]) -> float:
    """What part of a step its communication is."""
    bare = next(s for s in rows if (s.how, s.sequences, s.context) == (NONE, r.sequences, r.context))
    return 1 - bare.ms / r.ms


def _step(r: StepRow, rows: Sequence[StepRow]) -> tuple[str, ...]:
    times = f"{r.ms:.2f}", f"{r.device_ms:.2f}", f"{r.bytes_ms:.2f}"
    return r.how, str(r.sequences), str(r.context), *times, "" if r.how == NONE else f"{share(r, rows):.1%}"


def _load(r: LoadRow) -> tuple[str, ...]:
    slow, fast = max(r.seconds), min(r.seconds)
    return r.state, f"{slow:.2f}", f"{fast:.2f}", f"{(slow - fast) / slow:.1%}", f"{r.gb:.2f}", f"{r.gb / slow:.2f}"


def plot(rows: Sequence[Row], facts: dict[str, str], out: Path) -> None:
    """Sums by message, steps by batch."""
    with figure(out, 2) as (left, right):
        added = [r for r in rows if isinstance(r, SumRow)]
        for how in dict.fromkeys(r.how for r in added):
            mine = [r for r in added if r.how == how]
            left.plot([r.bytes / 1024 for r in mine], [r.us for r in mine], marker="o", label=how)
        left.set(
            xscale="log", yscale="log", xlabel="KiB", ylabel="us a sum", title=f"{facts['ranks']} x {facts['card']}"
        )
        left.legend(fontsize=8)
        stepped = [r for r in rows if isinstance(r, StepRow)]
        for how in dict.fromkeys(r.how for r in stepped):
            of = [r for r in stepped if r.how == how]
            right.plot([r.sequences for r in of], [r.ms for r in of], marker="o", label=f"sums: {how}")
        right.set(xscale="log", xlabel="sequences", ylabel="ms a decode step", title=facts["mesh"])
        right.legend(fontsize=8)


def facts_of(dims: TextDims, mesh: Mesh, device: str) -> dict[str, str]:
    """Where and with what it is measured."""
    facts = {"ranks": str(mesh.world), "mesh": str(mesh), "layers": str(dims.layers), "card": platform.machine()}
    if device == "cuda":
        count = range(torch.cuda.device_count())
        apart = [f"{a} {b}" for a, b in permutations(count, 2) if not torch.cuda.can_device_access_peer(a, b)]
        nccl: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts["card"] = torch.cuda.get_device_name()
        facts |= {
            "driver": driver(), "NCCL": ".".join(map(str, nccl)),
            "cards that cannot read each other": ", ".join(apart) or "none",
        }  # fmt: skip
    command = f"python -m runtime_min.bench.ranks {shlex.join(sys.argv[1:])}"
    return facts | {
        "torch": torch.__version__, "Python": platform.python_version(), "command": command,
    }  # fmt: skip


def numbers(_: Any, __: Any, text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


@click.command()
@click.option("--world", type=click.IntRange(2), required=True, help="Ranks, which is TP too.")
@click.option("--ep", type=click.IntRange(1), default=1)
@click.option("--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True)
@click.option("--layers", type=click.IntRange(1), default=None, help="[default: as many as fit]")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option("--tokens", callback=numbers, default=",".join(map(str, TOKENS)), help="Of sums alone.")
@click.option("--batches", callback=numbers, default="1,8,32,64,128", help="Sequences of decode steps.")
@click.option("--context", type=click.IntRange(32), default=4096, help="Cached tokens of each.")
@click.option("--artifact", type=click.Path(path_type=Path, exists=True), default=None, help="To load on all ranks.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Of loading, in each state.")
@card_options
def main(
    world: int, ep: int, config: Path, layers: int | None, device: str, tokens: tuple[int, ...],
    batches: tuple[int, ...], context: int, artifact: Path | None, rounds: int, card: Card,
    result: Path | None,
) -> None:  # fmt: skip
    """Measure ranks that share this host, with layers as the config.json describes them."""
    mesh, dims = Mesh(world=world, tp=world, ep=ep), read_config(manifest.read_json(config)).text
    if device == "cuda" and torch.cuda.device_count() < world:
        raise click.ClickException(f"--world {world}: {torch.cuda.device_count()} GPUs are there; use --device cpu")
    if layers is None and device == "cuda":
        room = torch.cuda.mem_get_info()[0] - RESERVE
        layers = fitting(dims, mesh, context * max(batches), room)
    dims = replace(dims, layers=min(layers or dims.layers, dims.layers))
    plan = Plan(
        dims=dims, mesh=mesh, device=device, tokens=tokens, batches=batches, context=context, artifact=artifact,
        rounds=rounds, card=card, result=result, facts=facts_of(dims, mesh, device),
    )  # fmt: skip
    kernels = compiled(dims, mesh) if device == "cuda" else {}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (plan, kernels, f"file://{folder}/store"), nprocs=world)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
