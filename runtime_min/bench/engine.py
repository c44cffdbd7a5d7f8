"""The engine at one rank's full geometry: random weights made on the card, no communication.

Decode: wall milliseconds a step, everything included (scheduling, graph, sampling, the host's reading), beside those of
the graph alone, which tells how long the card waits for the host. Prefill: prompt tokens a second.
"""

import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from runtime_min.bench.decode import floor
from runtime_min.core import Core
from runtime_min.engine import Engine
from runtime_min.kernels.choose import chooser_here
from runtime_min.kernels.compile import Alone
from runtime_min.kernels.jit import Jit
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_dims, random
from runtime_min.ops import triton_ops
from runtime_min.request import Limits, Request
from runtime_min.sample import Sampling
from runtime_min.sampler import Row
from runtime_min.scheduler import Active
from specs import manifest
from specs.config import read_config
from specs.dims import TextDims
from specs.mesh import Mesh

DECODE = ((1, 8192), (8, 8192), (32, 8192), (64, 8192), (128, 4096))
PREFILL = (8192, 65536)
STEPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """idle: share of a step in which the card does nothing of it."""

    sequences: int
    context: int
    ms: float
    device_ms: float
    floor_ms: float
    idle: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    tokens: int
    seconds: float
    tokens_s: float
    floor_tokens_s: float


def flops(d: TextDims, mesh: Mesh, tokens: int) -> float:
    """Floating-point operations of this rank for a prompt: dense products, the chosen experts, attention over expanded
    keys, half of the square."""
    heads = d.heads // mesh.tp
    attention = (d.q_lora + d.kv_a) * d.hidden + heads * (
        d.qk_head * d.q_lora + (d.qk_nope + d.v_head) * d.kv_lora + d.v_head * d.hidden
    )
    routed = 3 * d.hidden * d.moe_ff * d.top_k / mesh.world
    moe = routed + d.experts * d.hidden + 3 * d.shared_ff // mesh.tp * d.hidden
    dense = 3 * d.dense_ff // mesh.tp * d.hidden
    products = d.layers * attention + (d.layers - d.dense_layers) * moe + d.dense_layers * dense
    scores = d.layers * heads * (d.qk_head + d.v_head) * tokens / 2
    return 2.0 * tokens * (products + scores)


def begun(core: Core, sequences: int, context: int) -> None:
    """Requests that are about to decode, their past made up: its rows are whatever the cache holds."""
    scheduler = core.schedulers[0]
    for i in range(sequences):
        prompt = tuple((17 * i + j) % core.bounds.vocab for j in range(context - STEPS - 1))
        a = Active(i, Request(prompt=prompt, max_tokens=STEPS + 1), i, list(prompt))
        scheduler.pool.grow(a.sequence, len(prompt))
        a.sequence.length, a.slot = len(prompt) - 1, scheduler.slots.pop()
        scheduler.running.append(a)
        core.active[i] = scheduler, a


def decoded(model: Decoder, sequences: int, context: int, floor_ms: float) -> DecodeRow:
    """Steps of the whole engine on the clock, then the same work on the card without the host in between."""
    limits = Limits(running=sequences, cache_tokens=sequences * context, context=context, graphs=sequences)
    core = Core(model, limits)
    runner, graphs = core.runner, core.runner.graphs
    assert graphs is not None
    runner.cache.rows[:, limits.page_tokens :].normal_()
    begun(core, sequences, context)
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        core.step([])
        times.append(1e3 * (time.perf_counter() - begin))
    rows = [Row(sampling=Sampling(), seed=0, position=1, slot=i) for i in range(sequences)]
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    first.record()
    for _ in range(STEPS):
        graphs.captured[sequences].replay()
        runner.sampler(graphs.logits[sequences], rows, None, model.ranks.agreed)
    last.record()
    torch.cuda.synchronize()
    # The first steps fill the pipeline.
    ms, device = statistics.median(times[4:]), float(first.elapsed_time(last)) / STEPS
    return DecodeRow(
        sequences=sequences, context=context, ms=ms, device_ms=device, floor_ms=floor_ms, idle=max(0.0, 1 - device / ms)
    )


def prefilled(model: Decoder, tokens: int, chunk: int, rate: float) -> PrefillRow:
    """Prompt tokens a second of one prompt in chunks, the first of two such prompts warming up."""
    context = tokens + 64
    core = Core(model, Limits(running=1, step_tokens=chunk, cache_tokens=context, context=context, graphs=0))
    engine = Engine.over(core)
    for start in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.generate([[(start + j) % core.bounds.vocab for j in range(tokens)]], max_tokens=1)
        seconds = time.perf_counter() - begin
    least = flops(model.dims, model.ranks.mesh, tokens) / rate / 1e12
    return PrefillRow(tokens=tokens, seconds=seconds, tokens_s=tokens / seconds, floor_tokens_s=tokens / least)


def table(decode: list[DecodeRow], prefill: list[PrefillRow], facts: dict[str, str]) -> str:
    told = ", ".join(f"{k} {v}" for k, v in facts.items())
    lines = [
        f"# The engine on one rank, no communication\n\n{told}.\n",
        "| batch | context | ms a step | on the card | card idle | ms for its bytes | ratio |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {r.sequences} | {r.context} | {r.ms:.2f} | {r.device_ms:.2f} | {r.idle:.1%} | {r.floor_ms:.2f} "
        f"| {r.ms / r.floor_ms:.2f} |"
        for r in decode
    ]
    lines += ["", "| prompt tokens | tokens/s | of the matrix rate's |", "|--:|--:|--:|"]
    lines += [f"| {r.tokens} | {r.tokens_s:,.0f} | {r.tokens_s / r.floor_tokens_s:.2f} |" for r in prefill]
    return "\n".join([*lines, ""])


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tp", default=8)
@click.option("--ep", default=1)
@click.option("--bandwidth", default=4650.0, help="GB/s that the card reads at best.")
@click.option("--rate", default=800.0, help="TFLOP/s that the card multiplies bf16 at best.")
@click.option("--chunk", default=8192, help="Tokens of a prefill step.")
@click.option("--result", type=click.Path(path_type=Path), default=None, help="Where to write NAME.json and NAME.md.")
def main(config: Path, tp: int, ep: int, bandwidth: float, rate: float, chunk: int, result: Path | None) -> None:
    """Measure decode and prefill of one rank of the model that CONFIG (a config.json) describes."""
    device, mesh = torch.device("cuda"), Mesh(world=tp, tp=tp, ep=ep)
    dims = read_config(manifest.read_json(config)).text
    weights = of_dims(dims, mesh, random(device), torch.bfloat16)
    how = Settings(dtype=torch.bfloat16, device=device, positions=max(PREFILL) + 64)
    model = Decoder(dims, weights, triton_ops(Jit(chooser_here())), Alone(0, mesh), how)
    decode = [decoded(model, n, c, floor(dims, mesh, n, c, bandwidth)) for n, c in DECODE]
    prefill = [prefilled(model, n, chunk, rate) for n in PREFILL]
    facts = {
        "card": torch.cuda.get_device_name(), "mesh": str(mesh), "layers": str(dims.layers), "chunk": str(chunk),
        "torch": torch.__version__, "Python": platform.python_version(),
    }  # fmt: skip
    text = table(decode, prefill, facts)
    click.echo(text)
    if result is not None:
        result.with_suffix(".md").write_text(text)
        found = {"facts": facts, "decode": [asdict(r) for r in decode], "prefill": [asdict(r) for r in prefill]}
        result.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
