"""Ranks of one host on the clock: sums alone, the engine's decode steps by how they add up, loading at once.

Each number is the slowest rank's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from runtime_min.artifact import Artifact, load
from runtime_min.bench.floors import decode_work
from runtime_min.bench.load import drop, timed
from runtime_min.bench.steps import Card, decoded, each_ms, once
from runtime_min.collectives import BUFFER
from runtime_min.kernels.compile import Alone
from runtime_min.memory import emptied
from runtime_min.models.decoder import Decoder
from runtime_min.ranks import Ranks, check

# Sums one after another in a graph.
CALLS = 50
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class SumRow:
    """Microseconds of one sum of [tokens, hidden], alone."""

    tokens: int
    bytes: int
    how: str
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Milliseconds of a decode step of the engine, and of what it gives the card to do. how: what adds up, "none" for
    no communication at all. bytes_ms: what the step's bytes alone would take."""

    sequences: int
    context: int
    how: str
    ms: float
    device_ms: float
    bytes_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One round of all ranks loading at once: seconds of each rank, GB of all of them together."""

    state: str
    seconds: tuple[float, ...]
    gb: float


def ways(group: Ranks) -> dict[str, Ranks]:
    """The same ranks by each way to add up that there is."""
    plain = "NCCL" if group.sums != "gloo" else "gloo"
    out = {plain: replace(group, symmetric=None)}
    return out if group.symmetric is None else out | {"symmetric": group}


def sums(
    group: Ranks, tokens: Sequence[int], hidden: int, device: torch.device, dtype: torch.dtype
) -> Iterator[SumRow]:
    made = ways(group)
    if group.symmetric is not None:
        del made["symmetric"]
        made["one-shot"] = replace(group, symmetric=replace(group.symmetric, one_shot=BUFFER))
        made["two-shot"] = replace(group, symmetric=replace(group.symmetric, one_shot=0))
    for count in tokens:
        x = torch.zeros(count, hidden, dtype=dtype, device=device)
        for how, ranked in made.items():

            def every(ranked: Ranks = ranked, x: torch.Tensor = x) -> None:
                for _ in range(CALLS):
                    ranked.sum(x)

            us = 1e3 * each_ms(device, once(device, every)) / CALLS
            yield SumRow(tokens=count, bytes=x.numel() * x.element_size(), how=how, us=max(group.every(us)))


def steps(
    build: Callable[[Ranks], Decoder], group: Ranks, batches: Sequence[int], context: int, card: Card
) -> Iterator[StepRow]:
    """Every batch without communication and then by each way to add up; build: the model among these ranks."""
    models = {how: build(ranked) for how, ranked in ({NONE: Alone(group.rank, group.mesh)} | ways(group)).items()}
    for n in batches:
        for how, model in models.items():
            emptied()
            group.every(n)
            row = decoded(model, n, context, decode_work(model.dims, group.mesh, n, context), card)
            ms, device_ms = (max(times) for times in zip(*group.every((row.ms, row.device_ms)), strict=True))
            yield StepRow(sequences=n, context=context, how=how, ms=ms, device_ms=device_ms, bytes_ms=row.bytes_ms)


def loads(folder: Path, group: Ranks, rounds: int, device: torch.device) -> Iterator[LoadRow]:
    """Rounds with the files' pages dropped first, and rounds after a read."""
    artifact = Artifact.open(folder, group.rank, verify=False)
    check(artifact.mesh, group.rank, group.mesh.world)
    files = sorted({e["path"] for e in artifact.entries})
    gb = sum(group.every(sum(f.stat().st_size for f in files))) / 1e9
    for state in ("cold", "warm"):
        for _ in range(rounds):
            if state == "cold":
                drop(files)
            group.every(state)
            seconds = timed(lambda: load(artifact.entries, device), device)
            yield LoadRow(state=state, seconds=tuple(group.every(seconds)), gb=gb)
