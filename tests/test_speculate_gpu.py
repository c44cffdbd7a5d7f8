"""Speculation on a card: captured verify steps equal eager ones, answers are those of plain decoding, memory counts."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convert.demo.drafts import DRAFT_KINDS, write_draft
from convert.drafts import all_asked, finished, prepared, write
from runtime_min.core import Core
from runtime_min.engine import Engine, Local
from runtime_min.kv import batch
from runtime_min.memory import MemoryPlan
from runtime_min.pages import Sequence
from runtime_min.request import Limits, Request
from runtime_min.sample import Sampling
from tests.lab import converted

LIMITS = Limits(
    running=16, step_tokens=512, share=64, cache_tokens=64 * 64, context=1024, graphs=16, spec_tokens=3,
    spec_adaptive=False,
)  # fmt: skip
KINDS = sorted(DRAFT_KINDS)


@pytest.fixture(scope="module")
def artifact(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    converted(demo, folder / "artifact")
    for kind in KINDS:
        write_draft(folder / kind, kind)
    for draft in prepared(all_asked([str(folder / kind) for kind in KINDS]), finished(folder / "artifact")):
        write(draft, folder / "artifact", workers=2)
    return folder / "artifact"


@pytest.fixture(scope="module")
def bare(artifact: Path) -> MemoryPlan:
    """Of an engine without a draft, made and gone before any other: a plan counts all that its process holds."""
    with Engine(artifact, LIMITS, device="cuda", dtype="float32") as engine:
        found = core(engine).memory
    assert found is not None
    return found


@pytest.fixture(scope="module", params=[(kind, tree) for kind in KINDS for tree in (0, 15)], ids=str)
def engine(artifact: Path, bare: MemoryPlan, request: pytest.FixtureRequest) -> Iterator[Engine]:
    kind, tree = request.param
    limits = replace(LIMITS, draft=kind, spec_tree=tree)
    with Engine(artifact, limits, device="cuda", dtype="float32") as engine:
        yield engine


def core(engine: Engine) -> Core:
    assert isinstance(engine.link, Local)
    return engine.link.core


def requests(count: int, seed: int) -> list[Request]:
    r = random.Random(seed)
    return [
        Request(
            prompt=tuple(r.randrange(512) for _ in range(r.choice((1, 5, 63, 64, 65, 200)))),
            max_tokens=r.randint(1, 30),
        )
        for _ in range(count)
    ]


@pytest.mark.gpu
def test_a_verify_graph_gives_the_bits_of_the_eager_step(engine: Engine) -> None:
    """Logits, tapped states and cache rows, with and without padding, chains and trees."""
    made, cache, model = core(engine).runner.verify, core(engine).runner.cache, core(engine).model
    assert made is not None and made.taps
    r, trees = random.Random(3), made.tree is not None
    for n in made.counts:
        for real in {n, max(1, n - 1), n // 2 + 1}:
            cache.rows[:, 64:].normal_()
            work, left = [], real
            while left:
                sequence, count = Sequence(), min(left, r.randint(1, made.queries))
                length = r.randint(1, 100)
                cache.grow(sequence, length + count)
                sequence.length = length
                work.append((sequence, [r.randrange(512) for _ in range(count)]))
                left -= count
            parents = [[-1, *(r.randrange(i) for i in range(1, len(ids)))] for _, ids in work] if trees else []
            step = batch(cache, work, list(range(real)), n - real, parents=parents)
            assert made.fill(step) == n
            before = cache.rows.clone()
            eager, states = model.tapped(made.batch(n), cache, taps=made.taps)
            after = cache.rows.clone()
            cache.rows.copy_(before)
            assert torch.equal(made.replay(step), eager[:real]) and torch.equal(cache.rows, after)
            captured = made.states[n]
            assert captured is not None and states is not None and torch.equal(captured[:real], states[:real])
            for sequence, _ in work:
                cache.pool.release(sequence)


@pytest.mark.gpu
def test_greedy_answers_are_those_without_drafts(engine: Engine, artifact: Path) -> None:
    """In float32 the steps' sizes move no token of the demo model."""
    asked = requests(24, 1)
    with Engine(artifact, replace(LIMITS, graphs=0), device="cuda", dtype="float32") as other:
        want = [r.ids for r in other.generate(asked)]
    assert [r.ids for r in engine.generate(asked)] == want
    found = engine.stats.drafts
    assert found is not None and found.drafts and found.draft_ms > 0 and found.verify_ms > 0


@pytest.mark.gpu
def test_sampled_requests_end_and_nothing_compiles_past_ready(engine: Engine) -> None:
    hot = Sampling(temperature=1.0, top_p=0.9, presence=0.3, logprobs=2, seed=5)
    results = engine.generate([replace(r, sampling=hot) for r in requests(24, 2)])
    assert all(r.error is None and len(r.logprobs) == len(r.ids) for r in results)
    assert core(engine).ready > 0 and core(engine).compiled == core(engine).ready


@pytest.mark.gpu
def test_the_memory_plan_counts_the_draft(engine: Engine, bare: MemoryPlan) -> None:
    found = core(engine).memory
    assert found is not None
    assert found.weights > bare.weights and found.page_bytes > bare.page_bytes and found.workspace > bare.workspace
    engine.generate(requests(40, 3))
    assert torch.cuda.max_memory_reserved() < found.total - found.left + (1 << 30)
