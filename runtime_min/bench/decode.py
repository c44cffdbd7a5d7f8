"""Milliseconds of a decode step of one rank at full geometry: random weights made on the card, no communication."""

import platform
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import click
import torch

from runtime_min.bench.floors import decode_work
from runtime_min.bench.report import page, write
from runtime_min.kernels.choose import chooser_here
from runtime_min.kernels.compile import Alone, work
from runtime_min.kernels.jit import Jit
from runtime_min.kernels.race import captured, replay
from runtime_min.kernels.record import Step
from runtime_min.kv import Batch, LatentCache, batch
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_dims, random
from runtime_min.ops import triton_ops
from specs import manifest
from specs.config import read_config
from specs.mesh import Mesh

CASES = ((1, 8192), (8, 8192), (32, 8192), (64, 8192), (128, 4096))
REPLAYS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch: sequences, cached tokens each, milliseconds a step, and what its bytes alone would take."""

    sequences: int
    context: int
    ms: float
    floor_ms: float


def measured(model: Decoder, sequences: int, context: int) -> float:
    """Milliseconds of the fastest of a few replays of the captured step."""
    cache = model.cache(sequences * context)
    cache.rows.normal_()
    step = last_tokens(cache, sequences, context)
    for _ in range(2):
        model.forward(step, cache)
    graph = captured(lambda: model.forward(step, cache))
    return min(replay(graph) for _ in range(REPLAYS))


def last_tokens(cache: LatentCache, sequences: int, context: int) -> Batch:
    """One query token for each of `sequences` sequences whose other tokens are cached."""
    number = count()
    return batch(cache, work(cache, Step(((1, context),) * sequences), lambda _: [next(number)]))


def table(rows: list[Row], facts: dict[str, str]) -> str:
    lines = [f"| {r.sequences} | {r.context} | {r.ms:.2f} | {r.floor_ms:.2f} | {r.ms / r.floor_ms:.2f} |" for r in rows]
    head = ["| batch | context | ms a step | ms for its bytes | ratio |", "|--:|--:|--:|--:|--:|"]
    return page("Decode step of one rank, no communication", facts, [*head, *lines])


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tp", default=8)
@click.option("--ep", default=1)
@click.option("--bandwidth", default=4650.0, help="GB/s that the card reads at best.")
@click.option("--result", type=click.Path(path_type=Path), default=None, help="Where to write NAME.json and NAME.md.")
def main(config: Path, tp: int, ep: int, bandwidth: float, result: Path | None) -> None:
    """Measure the decode step of one rank of the model that CONFIG (a config.json) describes."""
    device, mesh = torch.device("cuda"), Mesh(world=tp, tp=tp, ep=ep)
    dims = read_config(manifest.read_json(config)).text
    weights = of_dims(dims, mesh, random(device), torch.bfloat16)
    how = Settings(dtype=torch.bfloat16, device=device, positions=max(c for _, c in CASES))
    model = Decoder(dims, weights, triton_ops(Jit(chooser_here())), Alone(0, mesh), how)
    floors = {(n, c): decode_work(dims, mesh, n, c).bytes / bandwidth / 1e6 for n, c in CASES}
    rows = [Row(sequences=n, context=c, ms=measured(model, n, c), floor_ms=floors[n, c]) for n, c in CASES]
    facts = {
        "card": torch.cuda.get_device_name(), "mesh": str(mesh), "layers": str(dims.layers),
        "torch": torch.__version__, "Python": platform.python_version(),
    }  # fmt: skip
    text = table(rows, facts)
    click.echo(text)
    if result is not None:
        write(result, text, facts, [asdict(r) for r in rows])


if __name__ == "__main__":
    main()
