"""What drafting costs at one rank's full geometry: random weights made on the card, no communication.

Verify steps of one request from CUDA graphs, with the shares of decode attention and of the experts; passes of every
kind of draft; and from both how many tokens a round must give to be worth as much as plain decoding. What is measured
is written after every row.
"""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import torch

from runtime_min.bench.passes import (
    EXTENDED,
    LEVEL,
    LEVELS,
    DraftRow,
    EvenRow,
    Row,
    VerifyRow,
    drafted,
    evens,
    passes,
    verified,
)
from runtime_min.bench.report import figure, grid, page, write
from runtime_min.bench.steps import Card, appended, card_options
from runtime_min.drafts import DFlash, Draft
from runtime_min.drafts.open import made
from runtime_min.drafts.shapes import known, of_draft_dims
from runtime_min.kernels.choose import chooser_here
from runtime_min.kernels.compile import Alone
from runtime_min.kernels.cubin import arch_here
from runtime_min.kernels.launch import Problem
from runtime_min.kernels.race import Race, Using
from runtime_min.kernels.record import Recorder, Step
from runtime_min.kv import room
from runtime_min.memory import emptied
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import Make, of_dims, random
from runtime_min.ops import Ops, triton_ops
from specs import manifest
from specs.config import read_config
from specs.dims import TextDims
from specs.mesh import Mesh

PARTS = {VerifyRow: "verify", DraftRow: "draft", EvenRow: "break-even"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """(query tokens, whether they are a tree's nodes) of verify steps, the plain one first; cached tokens."""

    verify: tuple[tuple[int, bool], ...] = (
        (1, False), (2, False), (4, False), (8, False), (16, False), (16, True), (64, True),
    )  # fmt: skip
    contexts: tuple[int, ...] = (8192, 65536)


def bench(model: Decoder, drafts: Mapping[str, Draft], cases: Cases, card: Card) -> Iterator[Row]:
    """Every row, one context after the other."""
    block = next((d.block for d in drafts.values() if isinstance(d, DFlash)), 0)
    for context in cases.contexts:
        rows: list[Row] = []
        for tokens, tree in cases.verify:
            emptied_on(model)
            rows.append(verified(model, tokens, tree, context, card))
            yield rows[-1]
        for kind, draft in drafts.items():
            emptied_on(model)
            rows.append(drafted(kind, draft, context))
            yield rows[-1]
        yield from evens(rows, block)


def emptied_on(model: Decoder) -> None:
    if model.settings.device.type == "cuda":
        emptied()


def table(rows: Sequence[Row], facts: Mapping[str, str]) -> str:
    """Markdown of as many rows as there are."""
    verify = [r for r in rows if isinstance(r, VerifyRow)]
    head = ("context", "tokens", "ms a step", "of one", "attention", "limit", "experts", "limit", "the rest")
    lines = grid(head, (_verify(r, verify) for r in verify))
    drafts = [r for r in rows if isinstance(r, DraftRow)]
    lines += ["", f"A pass of each draft; a level has {LEVEL} nodes, extending takes {EXTENDED} tokens:", ""]
    lines += grid(
        ("draft", "context", "extend ms", "step ms", "level ms"),
        (
            (r.kind, str(r.context), *(f"{t:.3f}" if t else "" for t in (r.extend_ms, r.step_ms, r.level_ms)))
            for r in drafts
        ),
        words=1,
    )  # fmt: skip
    lines += [
        "",
        "Accept length, the target's own token included, at which a round is as fast as plain decoding. EAGLE3: "
        f"extend, then a step for every further token, or {LEVELS} levels of a tree; DFlash: extend and one block:",
        "",
    ]
    lines += grid(
        ("draft", "context", "drafted", "ms a round", "breaks even at"),
        (
            (
                r.kind, str(r.context), f"{r.drafted}{' as a tree' if r.tree else ''}", f"{r.ms:.2f}",
                f"{r.accept_length:.2f}",
            )
            for r in rows
            if isinstance(r, EvenRow)
        ),
        words=1,
    )  # fmt: skip
    return page("Drafting and verifying on one rank, no communication", facts, lines)


def _verify(r: VerifyRow, every: Sequence[VerifyRow]) -> tuple[str, ...]:
    one = next(v.ms for v in every if v.context == r.context and v.tokens == 1)
    tokens = f"{r.tokens}{' as a tree' if r.tree else ''}"
    parts = r.mla_ms, r.mla_limit_ms, r.moe_ms, r.moe_limit_ms, r.ms - r.mla_ms - r.moe_ms
    return str(r.context), tokens, f"{r.ms:.2f}", f"{r.ms / one:.2f}", *(f"{t:.2f}" for t in parts)


def plot(rows: Sequence[Row], facts: Mapping[str, str], out: Path) -> None:
    """Verify steps by tokens with their shares, and the accept length at which each draft breaks even."""
    with figure(out, 2) as (left, right):
        for context, style in zip(sorted({r.context for r in rows}), ("-", "--", ":"), strict=False):
            verify = [r for r in rows if isinstance(r, VerifyRow) and r.context == context]
            # Where both were measured, the chain.
            verify = [v for v in verify if not (v.tree and any(o.tokens == v.tokens and not o.tree for o in verify))]
            x = [v.tokens for v in verify]
            for name, color in (("ms", "black"), ("moe_ms", "tab:orange"), ("mla_ms", "tab:blue")):
                said = {"ms": "step", "moe_ms": "experts", "mla_ms": "attention"}[name]
                y = [getattr(v, name) for v in verify]
                left.plot(x, y, style, color=color, marker=".", label=f"{said}, {context} tokens")
            even = [r for r in rows if isinstance(r, EvenRow) and r.context == context and not r.tree]
            for i, kind in enumerate(dict.fromkeys(r.kind for r in even)):
                mine = [r for r in even if r.kind == kind]
                right.plot(
                    [r.drafted for r in mine], [r.accept_length for r in mine], style, color=f"C{i}", marker="o",
                    label=f"{kind}, {context} tokens",
                )  # fmt: skip
        left.set(xscale="log", xlabel="query tokens of one request", ylabel="ms", title=facts["card"])
        right.set(xlabel="drafted tokens", ylabel="accept length", title="as fast as plain decoding")
        for axes in (left, right):
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=7)


def leave(result: Path, rows: Sequence[Row], facts: Mapping[str, str]) -> None:
    """NAME.md and NAME.json."""
    write(result, table(rows, facts), facts, [{"part": PARTS[type(r)], **asdict(r)} for r in rows])


def built(dims: TextDims, mesh: Mesh, make: Make, ops: Ops, how: Settings) -> tuple[Decoder, dict[str, Draft]]:
    """One rank's target and a draft of every kind, weights made by `make`."""
    model = Decoder(dims, of_dims(dims, mesh, make, how.dtype), ops, Alone(0, mesh), how)
    drafts = {kind: made(d, of_draft_dims(d, mesh, make, how.dtype), model) for kind, d in known(dims).items()}
    return model, drafts


def recorded(dims: TextDims, mesh: Mesh, cases: Cases, choose: Callable[[Problem], object]) -> Recorder:
    """Every kernel that `bench` launches, by shapes alone; a layer of each kind stands for all."""
    recorder, meta = Recorder(choose), torch.device("meta")
    small = replace(dims, layers=2, dense_layers=1)
    how = Settings(dtype=torch.bfloat16, device=meta, positions=max(cases.contexts))

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=meta)

    model, drafts = built(small, mesh, make, triton_ops(recorder), how)
    for context in cases.contexts:
        for tokens, tree in cases.verify:
            cache = model.cache(room([context]))
            model.forward(appended(cache, Step(((tokens, context),), tree=tree)), cache)
        for draft in drafts.values():
            for pass_ in passes(draft, context).values():
                pass_()
    return recorder


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tp", default=8)
@click.option("--ep", default=1)
@card_options
def main(config: Path, tp: int, ep: int, card: Card, result: Path | None) -> None:
    """Measure drafts beside one rank of the model that CONFIG (a config.json) describes."""
    device, mesh, cases = torch.device("cuda"), Mesh(world=tp, tp=tp, ep=ep), Cases()
    dims, choose = read_config(manifest.read_json(config)).text, chooser_here()
    facts = {
        "card": torch.cuda.get_device_name(), "limits": str(card), "mesh": str(mesh),
        "layers": str(dims.layers), "requests": "1", "torch": torch.__version__, "Python": platform.python_version(),
    }  # fmt: skip
    rows: list[Row] = []
    with Race(arch_here(), choose, len(os.sched_getaffinity(0))) as race:
        race.ahead(recorded(dims, mesh, cases, choose).variants)
        how = Settings(dtype=torch.bfloat16, device=device, positions=max(cases.contexts))
        model, drafts = built(dims, mesh, random(device), triton_ops(Using(race)), how)
        for row in bench(model, drafts, cases, card):
            rows.append(row)
            click.echo(str(row), err=True)
            if result is not None:
                leave(result, rows, facts)
    click.echo(table(rows, facts))
    if result is not None:
        plot(rows, facts, result.with_suffix(".svg"))


if __name__ == "__main__":
    main()
