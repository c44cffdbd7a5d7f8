"""The engine on a card: graphs that equal eager steps, memory that stays flat, nothing compiled past ready."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime_min.core import Core
from runtime_min.engine import Engine, Local
from runtime_min.graphs import Graphs
from runtime_min.kv import batch
from runtime_min.memory import MemoryPlanError, plan
from runtime_min.pages import Sequence
from runtime_min.request import Limits, Request
from runtime_min.sample import Sampling
from tests.engines import mixed
from tests.lab import converted

VOCAB = 512

LIMITS = Limits(running=32, step_tokens=256, share=64, cache_tokens=64 * 64, context=1024, graphs=32)


@pytest.fixture(scope="module")
def artifact(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gpu") / "artifact"
    converted(demo, out)
    return out


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Iterator[Engine]:
    with Engine(artifact, LIMITS, device="cuda", dtype="float32") as engine:
        yield engine


def core(engine: Engine) -> Core:
    assert isinstance(engine.link, Local)
    return engine.link.core


def graphs(engine: Engine) -> Graphs:
    found = core(engine).runner.graphs
    assert found is not None
    return found


@pytest.mark.gpu
def test_a_graph_gives_the_bits_of_the_same_eager_step_for_every_size(engine: Engine) -> None:
    """With every number of real tokens, garbage in what padding could see, and nothing written but the real rows."""
    made, cache = graphs(engine), core(engine).runner.cache
    r = random.Random(3)
    for n in made.counts:
        for real in {n, max(1, n - 1), n // 2 + 1}:
            cache.rows[:, 64:].normal_()
            work = []
            for _ in range(real):
                sequence = Sequence()
                length = r.randint(0, 100)
                cache.grow(sequence, length)
                sequence.length = length
                work.append((sequence, [r.randrange(512)]))
            step = batch(cache, work, padding=n - real)
            assert made.fill(step) == n
            before = cache.rows.clone()
            eager = core(engine).model.forward(made.batch(n), cache)[:real]
            after = cache.rows.clone()
            cache.rows.copy_(before)
            assert torch.equal(made.replay(step), eager) and torch.equal(cache.rows, after)
            touched = (after != before).any(-1).any(0).nonzero().flatten().tolist()
            assert touched == sorted(step.slots.tolist()[:real])
            unpadded = core(engine).model.forward(
                batch(cache, [(Sequence(s.pages, s.length - 1), ids) for s, ids in work]), cache
            )
            assert (unpadded - eager).abs().max() < 1e-3
            for sequence, _ in work:
                cache.pool.release(sequence)


@pytest.mark.gpu
def test_tokens_are_those_of_an_engine_without_graphs(engine: Engine, artifact: Path) -> None:
    asked = [replace(r, sampling=replace(r.sampling, temperature=0.0)) for r in mixed(40, 1, VOCAB)]
    with Engine(artifact, replace(LIMITS, graphs=0), device="cuda", dtype="float32") as other:
        assert core(other).runner.graphs is None
        want = [r.ids for r in other.generate(asked)]
    assert [r.ids for r in engine.generate(asked)] == want
    one_by_one = [engine.generate([a])[0].ids for a in asked[:8]]
    assert one_by_one == want[:8]


@pytest.mark.gpu
def test_nothing_compiles_past_ready(engine: Engine) -> None:
    engine.generate(mixed(50, 2, VOCAB))
    assert core(engine).ready > 0 and core(engine).compiled == core(engine).ready


@pytest.mark.gpu
def test_a_decode_step_waits_for_the_card_only_to_read_the_step_before(engine: Engine) -> None:
    """torch raises at any other wait; reading waits for an event, which it does not count."""
    r = random.Random(7)
    for _ in range(12):
        prompt = tuple(r.randrange(512) for _ in range(20))
        sampling = Sampling(temperature=r.choice((0.0, 1.0)), top_p=0.9, frequency=r.choice((0.0, 0.5)), logprobs=2)
        engine.submit(Request(prompt=prompt, max_tokens=30, sampling=sampling))
    for _ in range(5):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            assert len(engine.step()) == 12
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while engine.unfinished:
        engine.step()


@pytest.mark.gpu
def test_nan_in_one_request_ends_it_alone(engine: Engine) -> None:
    """In a prompt, in a decode step of a graph, and beside others that go on with the same tokens."""
    model = core(engine).model
    good = [replace(r, sampling=Sampling(bias=((500, -1e9),))) for r in mixed(12, 4, 500)]
    want = [r.ids for r in engine.generate(good)]
    kept = model.embed[500].clone()
    model.embed[500] = float("nan")
    try:
        prompted = Request(prompt=(*range(70), 500, 3), max_tokens=5)
        decoded = Request(prompt=tuple(range(80)), max_tokens=5, sampling=Sampling(bias=((500, 1e9),)))
        results = engine.generate([prompted, *good[:6], decoded, *good[6:]])
        assert results[0].finish == results[7].finish == "error" and results[7].ids == [500]
        assert [r.ids for r in (*results[1:7], *results[8:])] == want
        assert engine.generate([prompted])[0].cached <= 64
    finally:
        model.embed[500] = kept


@pytest.mark.gpu
@pytest.mark.slow
def test_two_thousand_requests_leave_memory_flat(artifact: Path) -> None:
    """bf16, mixed load, random cancels, preemption; pages, slots and bytes are what they were."""
    with Engine(artifact, LIMITS, device="cuda") as engine:
        r, left = random.Random(6), list(reversed(mixed(2000, 5, VOCAB)))
        bytes_at: list[int] = []
        ends = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
        while left or engine.unfinished:
            while left and len(engine.unfinished) < 100:
                engine.submit(left.pop())
            for event in engine.step():
                if event.finish is not None:
                    ends[event.finish] += 1
            for id in sorted(engine.unfinished):
                if r.random() < 0.003:
                    engine.cancel(id)
            if len(left) % 200 == 0:
                torch.cuda.synchronize()
                bytes_at.append(torch.cuda.memory_reserved())
        scheduler = core(engine).schedulers[0]
        assert sum(ends.values()) == 2000 and ends["cancelled"] > 50 and not ends["error"]
        assert scheduler.pool.available == scheduler.pool.pages and len(scheduler.slots) == LIMITS.running
        assert scheduler.preempted > 0 and core(engine).compiled == core(engine).ready
        assert max(bytes_at[len(bytes_at) // 4 :]) - bytes_at[len(bytes_at) // 4] <= 64 << 20
        memory = core(engine).memory
        assert memory is not None and torch.cuda.max_memory_reserved() < memory.total - memory.left + (1 << 30)


def test_the_memory_plan_adds_up_and_refuses_what_does_not_fit() -> None:
    gb = 1 << 30
    facts = {"total": 140 * gb, "free": 60 * gb, "weights": 78 * gb, "workspace": 3 * gb, "graphs": gb}
    page = 61 * 64 * 576 * 2
    made = plan(**facts, page_bytes=page, limits=Limits(memory=0.95))
    assert made.cache + page + 4 * gb + 7 * gb <= 60 * gb < made.cache + 2 * page + 4 * gb + 7 * gb + page
    assert made.left >= 7 * gb and f"{made.pages * 64} tokens in the cache" in made.line()
    fixed = plan(**facts, page_bytes=page, limits=Limits(memory=0.95, cache_tokens=262_144))
    assert fixed.pages == 4096 and fixed.left > made.left
    with pytest.raises(MemoryPlanError, match=r"1000000 tokens want 70\.\d+ GB of cache, 52\.\d+ GB are left"):
        plan(**facts, page_bytes=page, limits=Limits(memory=0.95, cache_tokens=1_000_000))
    with pytest.raises(MemoryPlanError, match="weights take"):
        plan(**(facts | {"free": 10 * gb}), page_bytes=page, limits=Limits(memory=0.95))
