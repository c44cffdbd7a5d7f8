"""Runs one op with one config at a time on this GPU: compiled in other processes, checked, and timed in CUDA graphs."""

import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from runtime_min.kernels.cases import Case
from runtime_min.kernels.check import difference, few_experts
from runtime_min.kernels.choose import Choose
from runtime_min.kernels.compile import compiled
from runtime_min.kernels.cubin import Loaded
from runtime_min.kernels.index import Compiled
from runtime_min.kernels.launch import Launch, Problem
from runtime_min.kernels.record import Recorder, Variant, variant
from runtime_min.ops import REF, triton_ops
from specs.schema import archs

# Root mean square error allowed, relative to that of the definition: bf16 rounds inputs, weights and results once each.
BOUND = 1e-2
ROUNDS = 5
CALLS = 8
# Seconds of replays a config is given at most.
PATIENCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Median microseconds of a call over rounds of many, and the largest less the smallest over the median."""

    us: float
    spread: float


@dataclass(frozen=True, slots=True)
class Using:
    """Kernels that give one problem, if there is one, a config of its own."""

    race: "Race"
    problem: Problem | None = None
    config: Any = None

    def pick(self, problem: Problem) -> Any:
        return self.config if problem == self.problem else self.race.choose(problem)

    def run(self, launch: Launch) -> None:
        key = variant(launch)
        self.race.need(key)
        self.race.loaded.run(launch, key)

    @property
    def compiled(self) -> int:
        return len(self.race.loaded.kernels)


class Race(AbstractContextManager["Race"]):
    """Compiles ahead in `workers` processes, and keeps what is loaded. choose: configs of nested ops; overlap: as
    `Loaded` takes it."""

    def __init__(self, arch: str, choose: Choose, workers: int, overlap: bool = True) -> None:
        self.arch, self.choose, self.limit = arch, choose, archs()[arch]["shared_bytes"]
        self.loaded = Loaded(overlap)
        self.pool = ProcessPoolExecutor(workers, get_context("spawn"))
        self.made: dict[Variant, Future[tuple[Compiled, bytes]]] = {}

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def variants(self, case: Case, config: Any) -> list[Variant]:
        """What a call with this config launches."""
        recorder = Recorder(lambda p: config if p == case.problem else self.choose(p))
        getattr(triton_ops(recorder), case.op)(*case.args)
        return list(recorder.variants)

    def ahead(self, wanted: Iterable[Variant]) -> None:
        """Starts compiling."""
        for key in wanted:
            if key not in self.made:
                self.made[key] = self.pool.submit(partial(compiled, key, self.arch))

    def fits(self, case: Case, config: Any) -> bool:
        """Does every kernel of this config stay inside the shared memory of a block?"""
        keys = self.variants(case, config)
        self.ahead(keys)
        return all(self.made[key].result()[0].shared_bytes <= self.limit for key in keys)

    def need(self, key: Variant) -> None:
        if key not in self.loaded.kernels:
            self.ahead([key])
            self.loaded.add(*self.made[key].result())

    def op(self, case: Case, config: Any) -> Callable[..., Any]:
        """The case's op with this config."""
        call: Callable[..., Any] = getattr(triton_ops(Using(self, case.problem, config)), case.op)
        return call

    def error(self, case: Case, config: Any, want: Any) -> float:
        """How far a result is from `want`, the definition's of `checkable(case)`."""
        return difference(self.op(case, config)(*checkable(case)), want)

    def time(self, case: Case, config: Any, inputs: list[tuple[Any, ...]]) -> Time:
        """inputs: `rotated(fresh(case))`, made once a case."""
        return timed(self.op(case, config), inputs)


def fresh(case: Case) -> tuple[Any, ...]:
    """The case's arguments; what the op overwrites is a copy."""
    return (case.args[0].clone(), *case.args[1:]) if case.op == "vit_attn" else case.args


def checkable(case: Case) -> tuple[Any, ...]:
    """`fresh`, with tokens routed to few experts: the definition unpacks each of them on the host."""
    return few_experts(case.args) if case.op == "moe_int4" else fresh(case)


def wanted(case: Case) -> Any:
    """What the definition says."""
    return getattr(REF, case.op)(*checkable(case))


def timed(call: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> Time:
    """Times `call` over its inputs in turn, many calls in a graph."""
    for args in inputs:
        call(*args)
    count = max(CALLS, len(inputs))

    def every() -> None:
        for i in range(count):
            call(*inputs[i % len(inputs)])

    graph = captured(every)
    first = replay(graph)
    rounds = max(3, min(ROUNDS, int(PATIENCE * 1e3 / max(first, 1e-3))))
    found = [replay(graph) * 1e3 / count for _ in range(rounds)]
    us = statistics.median(found)
    return Time(us=us, spread=(max(found) - min(found)) / us)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which has run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))
