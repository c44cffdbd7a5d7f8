"""The engine at one rank's full geometry: random weights made on the card, no communication.

Decode and prefill through the engine beside what bytes and flops alone would take, where the rest of a step goes op by
op, and what the size of a page costs. What is measured is written after every row, so a run that is cut short leaves
what it had.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import click
import torch

from runtime_min.bench.floors import decode_work
from runtime_min.bench.report import figure, grid, page, write
from runtime_min.bench.steps import (
    Card,
    DecodeRow,
    OpRow,
    PageRow,
    PrefillRow,
    card_options,
    decoded,
    op_by_op,
    paged,
    prefilled,
)  # fmt: skip
from runtime_min.kernels.choose import chooser_here
from runtime_min.kernels.compile import Alone, recorded
from runtime_min.kernels.cubin import arch_here, overlaps_here
from runtime_min.kernels.race import Race, Using
from runtime_min.memory import emptied
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_dims, random
from runtime_min.ops import triton_ops
from specs import manifest
from specs.config import read_config
from specs.mesh import Mesh

Row = DecodeRow | OpRow | PageRow | PrefillRow
PARTS = {DecodeRow: "decode", OpRow: "ops", PageRow: "pages", PrefillRow: "prefill"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """(sequences, cached tokens of each) of decode steps and, among them, of those to take apart; page sizes; (tokens,
    chunk) of prompts."""

    decode: tuple[tuple[int, int], ...] = ((1, 8192), (8, 8192), (32, 8192), (64, 8192), (128, 4096))
    ops: tuple[tuple[int, int], ...] = ((1, 8192), (64, 8192))
    paged: tuple[tuple[int, int], ...] = ((1, 8192), (64, 8192))
    pages: tuple[int, ...] = (16, 32, 64)
    prefill: tuple[tuple[int, int], ...] = ((8192, 2048), (8192, 8192), (65536, 8192))


def bench(model: Decoder, cases: Cases, card: Card) -> Iterator[Row]:
    """Every row, the most telling first."""
    mesh = model.ranks.mesh
    for n, c in cases.decode:
        emptied()
        yield decoded(model, n, c, decode_work(model.dims, mesh, n, c), card)
        if (n, c) in cases.ops:
            emptied()
            yield from op_by_op(model, n, c, card)
    for n, c in cases.paged:
        for size in cases.pages:
            emptied()
            yield paged(model, n, c, size, card)
    for tokens, chunk in cases.prefill:
        emptied()
        yield prefilled(model, tokens, chunk, card)


def table(rows: Sequence[Row], facts: dict[str, str]) -> str:
    """Markdown of as many rows as there are."""
    decode = [r for r in rows if isinstance(r, DecodeRow)]
    lines = grid(
        ("batch", "context", "ms a step", "on the card", "card idle", "ms for bytes", "ms for flops", "of limit"),
        (
            (
                str(r.sequences), str(r.context), f"{r.ms:.2f}", f"{r.device_ms:.2f}", f"{r.idle:.1%}",
                f"{r.bytes_ms:.2f}", f"{r.flops_ms:.2f}", f"{r.ms / max(r.bytes_ms, r.flops_ms):.2f}",
            )
            for r in decode
        ),
    )  # fmt: skip
    for d in decode:
        ops = ops_of(rows, d)
        if ops:
            lines += [
                "",
                f"A step of batch {d.sequences} at {d.context} tokens; all calls of an op in a graph alone:",
                "",
            ]
            lines += grid(("op", "calls", "ms", "limit", "above it", "share"), apart(d, ops), words=1)
    pages = [r for r in rows if isinstance(r, PageRow)]
    if pages:
        lines += ["", "Decode attention of one layer by tokens a page:", ""]
        lines += grid(("batch", "context", "page", "us", "limit", "of limit"), map(_page, pages))
    prefill = [r for r in rows if isinstance(r, PrefillRow)]
    if prefill:
        head = ("prompt tokens", "tokens a step", "seconds", "tokens/s", "at the matrix rate", "share")
        lines += ["", *grid(head, map(_prefill, prefill))]
    return page("The engine on one rank, no communication", facts, lines)


def ops_of(rows: Sequence[Row], d: DecodeRow) -> list[OpRow]:
    """The ops of a step that was taken apart."""
    return [r for r in rows if isinstance(r, OpRow) and (r.sequences, r.context) == (d.sequences, d.context)]


def apart(d: DecodeRow, ops: Sequence[OpRow]) -> Iterator[tuple[str, ...]]:
    """Where a step's milliseconds go: its ops, what is between and outside them, sampling, the host."""
    found = [(r.op, str(r.calls), r.ms, r.limit_ms) for r in ops]
    found.append(("between and outside ops", "", d.graph_ms - sum(r.ms for r in ops), 0.0))
    found.append(("sampling", "", d.device_ms - d.graph_ms, 0.0))
    found.append(("card idle", "", d.ms - d.device_ms, 0.0))
    found.append(("the step", "", d.ms, sum(r.limit_ms for r in ops)))
    for name, calls, ms, limit in found:
        yield name, calls, f"{ms:.3f}", f"{limit:.3f}", f"{ms - limit:.3f}", f"{ms / d.ms:.1%}"


def _page(r: PageRow) -> tuple[str, ...]:
    times = f"{r.us:.1f}", f"{r.limit_us:.1f}", f"{r.us / r.limit_us:.2f}"
    return str(r.sequences), str(r.context), str(r.page_tokens), *times


def _prefill(r: PrefillRow) -> tuple[str, ...]:
    rates = f"{r.tokens_s:,.0f}", f"{r.limit_tokens_s:,.0f}", f"{r.tokens_s / r.limit_tokens_s:.2f}"
    return str(r.tokens), str(r.chunk), f"{r.seconds:.2f}", *rates


def plot(rows: Sequence[Row], facts: dict[str, str], out: Path) -> None:
    """Decode steps beside their limit, and the ops of the smallest batch beside theirs."""
    decode = [r for r in rows if isinstance(r, DecodeRow)]
    with figure(out, 2) as (left, right):
        batches = [r.sequences for r in decode]
        left.plot(batches, [r.ms for r in decode], marker="o", label="the engine")
        left.plot(batches, [r.device_ms for r in decode], marker=".", label="on the card")
        left.plot(batches, [max(r.bytes_ms, r.flops_ms) for r in decode], color="black", label="limit")
        left.set(xscale="log", yscale="log", xlabel="sequences", ylabel="ms a decode step", title=facts["card"])
        left.legend(fontsize=8)
        ops = ops_of(rows, decode[0])[::-1]
        right.barh([r.op for r in ops], [r.ms for r in ops], label="ms in a step")
        right.barh([r.op for r in ops], [r.limit_ms for r in ops], height=0.4, color="black", label="limit")
        right.set(title=f"batch {decode[0].sequences}, {decode[0].context} tokens")
        right.legend(fontsize=8)


def leave(result: Path, rows: Sequence[Row], facts: dict[str, str]) -> None:
    """NAME.md and NAME.json."""
    write(result, table(rows, facts), facts, [{"part": PARTS[type(r)], **asdict(r)} for r in rows])


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tp", default=8)
@click.option("--ep", default=1)
@click.option("--overlap/--no-overlap", default=True, help="May launches begin before the one before them ends?")
@card_options
def main(config: Path, tp: int, ep: int, overlap: bool, card: Card, result: Path | None) -> None:
    """Measure the engine on one rank of the model that CONFIG (a config.json) describes."""
    device, mesh, cases = torch.device("cuda"), Mesh(world=tp, tp=tp, ep=ep), Cases()
    dims, choose = read_config(manifest.read_json(config)).text, chooser_here()
    small, meta = replace(dims, layers=2, dense_layers=1), partial(torch.empty, device="meta")
    facts = {
        "card": torch.cuda.get_device_name(), "limits": str(card), "mesh": str(mesh),
        "layers": str(dims.layers), "torch": torch.__version__, "Python": platform.python_version(),
        "overlap": str(overlap and overlaps_here()),
    }  # fmt: skip
    rows: list[Row] = []
    with Race(arch_here(), choose, len(os.sched_getaffinity(0)), overlap) as race:
        shapes = of_dims(small, mesh, lambda shape, dtype: meta(shape, dtype=dtype), torch.bfloat16)
        race.ahead(recorded(small, mesh, shapes, torch.bfloat16, choose).variants)
        weights = of_dims(dims, mesh, random(device), torch.bfloat16)
        longest = max(c for c, _ in cases.prefill) + 64
        how = Settings(dtype=torch.bfloat16, device=device, positions=longest)
        model = Decoder(dims, weights, triton_ops(Using(race)), Alone(0, mesh), how)
        for row in bench(model, cases, card):
            rows.append(row)
            click.echo(str(row), err=True)
            if result is not None:
                leave(result, rows, facts)
    click.echo(table(rows, facts))
    if result is not None:
        plot(rows, facts, result.with_suffix(".svg"))


if __name__ == "__main__":
    main()
