"""Milliseconds of a decode step of one rank at full geometry: random weights made on the card, no communication."""

import json
import platform
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from runtime_min.kernels.compile import Alone
from runtime_min.kernels.jit import Jit
from runtime_min.kv import Batch, LatentCache, batch
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_dims, random
from runtime_min.ops import triton_ops
from runtime_min.pages import Sequence
from specs import manifest
from specs.config import read_config
from specs.dims import TextDims
from specs.mesh import Mesh
from specs.storage import int4_slot

CASES = ((1, 8192), (8, 8192), (32, 8192), (64, 8192), (128, 4096))
REPLAYS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch: sequences, cached tokens each, milliseconds a step, and what its bytes alone would take."""

    sequences: int
    context: int
    ms: float
    floor_ms: float


def floor(d: TextDims, mesh: Mesh, sequences: int, context: int, gb_s: float) -> float:
    """Milliseconds to read once what a step must read: dense weights, the experts that `sequences` tokens choose if
    they choose evenly, and every cached row."""
    heads = d.heads // mesh.tp
    attention = (d.q_lora + d.kv_a) * d.hidden + heads * (
        d.qk_head * d.q_lora + (d.qk_nope + d.v_head) * d.kv_lora + d.v_head * d.hidden
    )
    width, here = d.moe_ff // mesh.etp, d.experts // mesh.ep
    chosen = here * (1 - (1 - d.top_k / d.experts) ** sequences)
    slot = 4 * (sum(int4_slot(2 * width, d.hidden)) + sum(int4_slot(d.hidden, width)))
    moe = chosen * slot + 2 * (d.experts * d.hidden + 3 * d.shared_ff // mesh.tp * d.hidden)
    dense = 2 * 3 * d.dense_ff // mesh.tp * d.hidden
    layers = d.layers * 2 * attention + (d.layers - d.dense_layers) * moe + d.dense_layers * dense
    head = 2 * d.vocab // mesh.tp * d.hidden
    cached = d.layers * sequences * context * 2 * d.kv_a
    return (layers + head + cached) / gb_s / 1e6


def measured(model: Decoder, sequences: int, context: int) -> float:
    """Milliseconds of the fastest of a few replays of the captured step."""
    cache = model.cache(sequences * context)
    cache.rows.normal_()
    step = last_tokens(cache, sequences, context)
    for _ in range(2):
        model.forward(step, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.forward(step, cache)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)


def last_tokens(cache: LatentCache, sequences: int, context: int) -> Batch:
    """One query token for each of `sequences` sequences whose other tokens are cached."""
    work = []
    for i in range(sequences):
        sequence = Sequence()
        cache.grow(sequence, context - 1)
        sequence.length = context - 1
        work.append((sequence, [i]))
    return batch(cache, work)


def table(rows: list[Row], facts: dict[str, str]) -> str:
    lines = [f"| {r.sequences} | {r.context} | {r.ms:.2f} | {r.floor_ms:.2f} | {r.ms / r.floor_ms:.2f} |" for r in rows]
    head = ["| batch | context | ms a step | ms for its bytes | ratio |", "|--:|--:|--:|--:|--:|"]
    told = ", ".join(f"{k} {v}" for k, v in facts.items())
    return "\n".join([f"# Decode step of one rank, no communication\n\n{told}.\n", *head, *lines, ""])


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
    model = Decoder(dims, weights, triton_ops(Jit()), Alone(0, mesh), how)
    rows = [
        Row(sequences=n, context=c, ms=measured(model, n, c), floor_ms=floor(dims, mesh, n, c, bandwidth))
        for n, c in CASES
    ]
    facts = {
        "card": torch.cuda.get_device_name(), "mesh": str(mesh), "layers": str(dims.layers),
        "torch": torch.__version__, "Python": platform.python_version(),
    }  # fmt: skip
    text = table(rows, facts)
    click.echo(text)
    if result is not None:
        result.with_suffix(".md").write_text(text)
        found = [{f: getattr(r, f) for f in ("sequences", "context", "ms", "floor_ms")} for r in rows]
        result.with_suffix(".json").write_text(json.dumps({"facts": facts, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
