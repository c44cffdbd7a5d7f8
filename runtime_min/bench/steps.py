"""Steps of one rank on the clock: the engine's decode and prefill, a step op by op, decode attention by page size.

Where there is no card the same code times the same calls on the host, so that it runs in tests.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from runtime_min.bench.floors import Work, prefill_flops, work
from runtime_min.core import Core
from runtime_min.engine import Engine
from runtime_min.kernels.check import with_layers
from runtime_min.kernels.compile import work as laid_out
from runtime_min.kernels.launch import Kernels, Launch, Problem
from runtime_min.kernels.mla_decode import launch as mla_decode
from runtime_min.kernels.race import captured
from runtime_min.kernels.record import Step
from runtime_min.kv import Batch, LatentCache, batch
from runtime_min.models.decoder import Decoder
from runtime_min.ops import Ops, each, triton_ops
from runtime_min.pages import PAGE_TOKENS, Sequence
from runtime_min.request import Limits, Request
from runtime_min.sample import Sampling
from runtime_min.sampler import Row, Sampler
from runtime_min.scheduler import Active

STEPS = 24
# The first steps of an engine fill its pipeline.
FILLING = 4
# Layers whose caches take turns, so that none is still in the card's cache when it comes again.
LAYERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Milliseconds of a step of the engine, of what it gives the card to do (graph and sampling), of the graph alone,
    and by the step's bytes and flops. idle: share of the step in which the card has nothing to do."""

    sequences: int
    context: int
    ms: float
    device_ms: float
    graph_ms: float
    bytes_ms: float
    flops_ms: float
    idle: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """All calls of one op in a step, one after another in a graph of their own, beside their limit."""

    sequences: int
    context: int
    op: str
    calls: int
    ms: float
    limit_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRow:
    """Decode attention of one layer over pages of this size, in random order."""

    sequences: int
    context: int
    page_tokens: int
    us: float
    limit_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """One prompt in steps of `chunk` tokens, from its submission to its first token."""

    tokens: int
    chunk: int
    seconds: float
    tokens_s: float
    limit_tokens_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """GB/s that it reads and TFLOP/s that it multiplies in bf16, at best."""

    gb_s: float
    tflops: float

    def __str__(self) -> str:
        return f"{self.gb_s:.0f} GB/s, {self.tflops:.0f} TFLOP/s"


def card_options(command: Callable[..., None]) -> Callable[..., None]:
    """What the card can do at best, which the command gets as `card`, and where its result goes."""

    @wraps(command)
    def with_card(bandwidth: float, rate: float, **given: Any) -> None:
        command(card=Card(gb_s=bandwidth, tflops=rate), **given)

    wrapped: Callable[..., None] = with_card
    for option in (
        click.option("--result", type=click.Path(path_type=Path), help="Write NAME.json, NAME.md and NAME.svg."),
        click.option("--rate", default=795.0, help="TFLOP/s that the card multiplies bf16 at best."),
        click.option("--bandwidth", default=4650.0, help="GB/s that the card reads at best."),
    ):
        wrapped = option(wrapped)
    return wrapped


def drained(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def once(device: torch.device, work: Callable[[], object]) -> Callable[[], object]:
    """`work`, which was run, as one graph where there is a card."""
    for _ in range(2):
        work()
    return captured(work).replay if device.type == "cuda" else work


def each_ms(device: torch.device, work: Callable[[], object]) -> float:
    """Milliseconds of one of STEPS runs of `work` one after another; the host only launches."""
    work()
    drained(device)
    begin = time.perf_counter()
    for _ in range(STEPS):
        work()
    drained(device)
    return 1e3 * (time.perf_counter() - begin) / STEPS


def begun(core: Core, sequences: int, context: int) -> list[Active]:
    """Requests that are about to decode, their past made up: its rows are whatever the cache holds."""
    scheduler = core.schedulers[0]
    for i in range(sequences):
        prompt = tuple((17 * i + j) % core.bounds.vocab for j in range(context - STEPS - 1))
        a = Active(i, Request(prompt=prompt, max_tokens=STEPS + 1), i, list(prompt))
        scheduler.pool.grow(a.sequence, len(prompt))
        a.sequence.length, a.slot = len(prompt) - 1, scheduler.slots.pop()
        scheduler.running.append(a)
        core.active[i] = scheduler, a
    return list(scheduler.running)


class Scattered(Sampler):
    """A sampler after which every sequence goes on with a token of its own: random weights lead all of them to the same
    few tokens, and these to the same few experts."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        super().__init__(slots, vocab, device)
        self.tokens = torch.arange(slots + 1, device=device) * 17 % vocab

    def __call__(self, *args: Any) -> Tensor:
        found = super().__call__(*args)
        self.last.copy_(self.tokens)
        return found


def decoded(model: Decoder, sequences: int, context: int, floor: Work, card: Card) -> DecodeRow:
    """Steps of the whole engine on the clock, and the same work on the card without the host in between."""
    device = model.settings.device
    core = Core(model, Limits(running=sequences, cache_tokens=sequences * context, context=context, graphs=sequences))
    cache, sampler = core.runner.cache, Scattered(sequences, model.dims.vocab, device)
    core.runner = replace(core.runner, sampler=sampler)
    cache.rows[:, cache.page_tokens :].normal_()
    running = begun(core, sequences, context)
    copies = [(Sequence(list(a.sequence.pages), a.sequence.length), a.tokens[-1:]) for a in running]
    step, held = batch(cache, copies), {}

    def forward() -> None:
        held["logits"] = model.forward(step, cache)

    graph = once(device, forward)
    rows = [Row(sampling=Sampling(), seed=0, position=1, slot=i) for i in range(sequences)]

    def sampled() -> None:
        graph()
        sampler(held["logits"], rows, None, model.ranks.agreed)

    graph_ms, device_ms, times = each_ms(device, graph), each_ms(device, sampled), []
    for _ in range(STEPS):
        begin = time.perf_counter()
        core.step([])
        times.append(1e3 * (time.perf_counter() - begin))
    ms = statistics.median(times[FILLING:])
    return DecodeRow(
        sequences=sequences, context=context, ms=ms, device_ms=device_ms, graph_ms=graph_ms,
        bytes_ms=floor.bytes / card.gb_s / 1e6, flops_ms=floor.flops / card.tflops / 1e9,
        idle=max(0.0, 1 - device_ms / ms),
    )  # fmt: skip


def appended(cache: LatentCache, step: Step) -> Batch:
    """The last tokens of every sequence of a step, whose others are cached; logits wanted for each."""
    number = itertools.count()
    work = laid_out(cache, step, lambda n: [next(number) for _ in range(n)])
    return batch(cache, work, list(range(sum(len(ids) for _, ids in work))), parents=step.parents)


def op_by_op(model: Decoder, sequences: int, context: int, card: Card) -> list[OpRow]:
    """What a decode step's time goes to: for each op all its calls of one step, with their own inputs."""
    cache = model.cache(sequences * context)
    cache.rows[:, cache.page_tokens :].normal_()
    found = timed_ops(model, appended(cache, Step(((1, context),) * sequences)), cache, card)
    rows = [
        OpRow(sequences=sequences, context=context, op=op, calls=calls, ms=ms, limit_ms=limit)
        for op, calls, ms, limit in found
    ]
    return sorted(rows, key=lambda r: -r.ms)


def timed_ops(
    model: Decoder, step: Batch, cache: LatentCache, card: Card, only: tuple[str, ...] = ()
) -> list[tuple[str, int, float, float]]:
    """(op, calls, ms, ms by the card's limits) of all calls of each op in a step, or of these ops, one op's calls in a
    graph of their own."""
    calls: dict[str, list[tuple[Any, ...]]] = {}
    limits: dict[str, float] = {}

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            result = getattr(model.ops, name)(*args)
            if name in only or not only:
                calls.setdefault(name, []).append(args)
                limits[name] = limits.get(name, 0.0) + work(name, args, result).us(card.gb_s, card.tflops) / 1e3
            return result

        return call

    with_layers(model, list(range(model.dims.layers)), each(model.ops, watched)).forward(step, cache)
    found = []
    for name, made in calls.items():

        def every(name: str = name, made: list[tuple[Any, ...]] = made) -> None:
            for args in made:
                getattr(model.ops, name)(*args)

        with torch.inference_mode():
            found.append((name, len(made), each_ms(cache.rows.device, once(cache.rows.device, every)), limits[name]))
    return found


@dataclass(frozen=True, slots=True)
class Resized:
    """Kernels whose decode attention has, at any page size, the config of PAGE_TOKENS, its shares equal in tokens;
    where there is no ring of pages of that size, the kernel without one."""

    kernels: Kernels

    def pick(self, problem: Problem) -> Any:
        if not isinstance(problem, mla_decode.Problem):
            return self.kernels.pick(problem)
        config = self.kernels.pick(replace(problem, page_tokens=PAGE_TOKENS))
        pages = max(1, config.pages * PAGE_TOKENS // problem.page_tokens)
        return replace(config, pages=pages, ring=config.ring if problem.streams else 0)

    def run(self, launch: Launch) -> None:
        self.kernels.run(launch)

    @property
    def compiled(self) -> int:
        return self.kernels.compiled


def paged(model: Decoder, sequences: int, context: int, page_tokens: int, card: Card) -> PageRow:
    d, how = model.dims, model.settings
    ops: Ops = model.ops if model.ops.kernels is None else triton_ops(Resized(model.ops.kernels))
    cache = LatentCache(LAYERS, sequences * context, d.kv_a, how.dtype, how.device, page_tokens)
    cache.rows.normal_()
    random.Random(0).shuffle(cache.pool.free)
    (part,) = appended(cache, Step(((1, context),) * sequences)).parts
    heads = d.heads // model.ranks.mesh.tp
    q_lat, q_pe = (torch.randn(sequences, heads, n, dtype=how.dtype, device=how.device) for n in (d.kv_lora, d.qk_rope))
    where = (part.pages, part.cu_q, part.lengths, page_tokens, model.scale, part.longest)

    def layers() -> None:
        for rows in cache.rows:
            ops.mla_decode(q_lat, q_pe, rows, *where)

    us = 1e3 * each_ms(how.device, once(how.device, layers)) / LAYERS
    args = (q_lat, q_pe, cache.rows[0], *where)
    limit = work("mla_decode", args, q_lat).us(card.gb_s, card.tflops)
    return PageRow(sequences=sequences, context=context, page_tokens=page_tokens, us=us, limit_us=limit)


def prefilled(model: Decoder, tokens: int, chunk: int, card: Card) -> PrefillRow:
    """The second of two prompts, of which the first is short and warms up."""
    context = tokens + PAGE_TOKENS
    limits = Limits(running=1, step_tokens=chunk, cache_tokens=context, context=context, graphs=0)
    core = Core(model, limits)
    engine, seconds = Engine.over(core), 0.0
    for first, count in ((0, min(tokens, 2 * chunk)), (1, tokens)):
        drained(model.settings.device)
        begin = time.perf_counter()
        engine.generate([[(first + j) % core.bounds.vocab for j in range(count)]], max_tokens=1)
        seconds = time.perf_counter() - begin
    least = prefill_flops(model.dims, model.ranks.mesh, tokens) / card.tflops / 1e12
    return PrefillRow(
        tokens=tokens, chunk=chunk, seconds=seconds, tokens_s=tokens / seconds, limit_tokens_s=tokens / least
    )  # fmt: skip
