"""Every op of a model on this GPU: microseconds beside the physical limit and beside other implementations."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from runtime_min.bench.floors import work
from runtime_min.bench.peers import Peer, peer
from runtime_min.bench.report import figure, grid, page
from runtime_min.kernels.cases import Case, cases, rotated, steps
from runtime_min.kernels.choose import chooser, chooser_here
from runtime_min.kernels.cubin import arch_here
from runtime_min.kernels.index import KernelError
from runtime_min.kernels.race import BOUND, Race, fresh, timed, wanted
from specs.dims import TextDims
from specs.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is benched. limits: GB/s that the card reads and TFLOP/s that it multiplies in bf16, at best."""

    dims: TextDims
    mesh: Mesh
    ops: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    gb_s: float
    tflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call. us by the tuned or default config, floor_us by bytes and flops alone, peers in us by name."""

    op: str
    problem: dict[str, Any]
    us: float
    default_us: float
    floor_us: float
    bytes: int
    flops: int
    error: float
    peers: dict[str, float] = field(default_factory=dict)


def bench(wish: Wish, progress: Callable[[int, int, str], None]) -> list[Row]:
    """A row for every problem. Raises KernelError, and gives no speed, if a result is not what the definition says."""
    arch = arch_here()
    tuned, default = chooser_here(), chooser(arch)
    peers = {name: peer(name) for name in wish.peers}
    found = cases(wish.dims, wish.mesh, list(steps()), torch.device("cuda"))
    chosen = [c for c in found if not wish.ops or c.problem.op in wish.ops]
    rows = []
    with Race(arch, tuned, len(os.sched_getaffinity(0))) as race:
        for case in chosen:
            for choose in (tuned, default):
                race.ahead(race.variants(case, choose(case.problem)))
        for number, case in enumerate(chosen):
            progress(number, len(chosen), case.op)
            rows.append(_row(race, case, tuned(case.problem), default(case.problem), peers, wish))
    return rows


def _row(race: Race, case: Case, tuned: Any, default: Any, peers: dict[str, Peer], wish: Wish) -> Row:
    want, inputs = wanted(case), rotated(fresh(case))
    error = race.error(case, tuned, want)
    if not error <= BOUND:
        raise KernelError(f"{case.problem}: differs from its definition by {error:.2g}; a wrong kernel has no speed")
    ours = race.time(case, tuned, inputs)
    plain = ours if tuned == default else race.time(case, default, inputs)
    result = race.op(case, tuned)(*case.args)
    asked = work(case.op, case.args, result)
    others = {name: call for name, p in peers.items() if (call := p(case)) is not None}
    return Row(
        op=case.op if case.problem.op == "linear" else case.problem.op,
        problem=asdict(case.problem), us=round(ours.us, 2), default_us=round(plain.us, 2),
        floor_us=round(asked.us(wish.gb_s, wish.tflops), 2), bytes=asked.bytes, flops=asked.flops, error=error,
        peers={name: round(timed(call, inputs).us, 2) for name, call in others.items()},
    )  # fmt: skip


def facts(wish: Wish) -> dict[str, str]:
    """Where and with what it was measured."""
    versions = {p: metadata.version(p) for p in ("torch", "triton")}
    if "humming" in wish.peers:
        versions["humming-kernels"] = metadata.version("humming-kernels")
    limits = f"{wish.gb_s:.0f} GB/s, {wish.tflops:.0f} TFLOP/s"
    return {"card": torch.cuda.get_device_name(), "limits": limits, "mesh": str(wish.mesh), **versions}


def table(rows: Sequence[Row], told: dict[str, str]) -> str:
    """Markdown: one line a row, grouped by op."""
    peers = list(dict.fromkeys(name for r in rows for name in r.peers))
    head = [
        "op",
        "sizes",
        "us",
        "default",
        "limit",
        "of limit",
        *peers,
        *(f"us / {p}" for p in peers),
    ]
    lines = []
    for r in sorted(rows, key=lambda r: r.op):
        times = [f"{r.us:.1f}", f"{r.default_us:.1f}", f"{r.floor_us:.1f}", f"{r.us / max(r.floor_us, 0.01):.2f}"]
        theirs = [f"{r.peers[p]:.1f}" if p in r.peers else "" for p in peers]
        ratios = [f"{r.us / r.peers[p]:.2f}" if p in r.peers else "" for p in peers]
        sizes = " ".join(f"{k}={v}" for k, v in r.problem.items() if v not in (False, 1) and k != "item")
        lines.append([r.op, sizes, *times, *theirs, *ratios])
    return page("Kernels of one rank", told, grid(head, lines, words=2))


def plot(rows: Sequence[Row], told: dict[str, str], out: Path, gb_s: float, tflops: float) -> None:
    """A roofline: achieved TFLOP/s over flops per byte, one colour an op."""
    with figure(out) as axes:
        intensity = [2.0**i for i in range(-1, 14)]
        axes.plot(intensity, [min(i * gb_s / 1e3, tflops) for i in intensity], color="black", label="limit")
        for op in sorted({r.op for r in rows if r.flops}):
            mine = [r for r in rows if r.op == op]
            axes.scatter([r.flops / r.bytes for r in mine], [r.flops / r.us / 1e6 for r in mine], s=14, label=op)
        axes.set(xscale="log", yscale="log", xlabel="flops per byte", ylabel="TFLOP/s")
        axes.set_title(f"{told['card']}, {told['mesh']}")
        axes.legend(fontsize=8)
