"""Drafts in the engine: whatever they propose, every request gives what it gives alone."""

from dataclasses import replace

import pytest

from runtime_min.request import Limits
from tests.engines import alone, held, tiny
from tests.speculating import KINDS, Scripted, answers, real, speculating, target
from tests.test_engine import requests

SMALL = Limits(running=6, step_tokens=48, share=8, cache_tokens=200, page_tokens=4, spec_adaptive=False)


def greedy(count: int, seed: int) -> list:
    return [replace(r, sampling=replace(r.sampling, temperature=0.0)) for r in requests(count, seed)]


@pytest.mark.parametrize("tree", [0, 9])
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_greedy(k: int, quality: float, tree: int) -> None:
    asked = greedy(40, 1)
    want = [alone(tiny(), r, 0) for r in asked]
    draft = Scripted(answers([[*r.prompt, *w] for r, w in zip(asked, want, strict=True)], quality))
    one = speculating(draft, replace(SMALL, spec_tokens=k, spec_tree=tree))
    results = one.generate(asked)
    for i, result in enumerate(results):
        assert result.ids == want[i], i
    print(one.stats.drafts.line())
    assert held(one) == 0


@pytest.mark.parametrize("tree", [0, 7, 30])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_real(kind: str, tree: int) -> None:
    asked = greedy(40, 1)
    want = [alone(target(), r, 0) for r in asked]
    one = speculating(real(kind), replace(SMALL, spec_tokens=3, spec_tree=tree), target())
    results = one.generate(asked)
    for i, result in enumerate(results):
        assert result.ids == want[i], i
    print(one.stats.drafts.line(), one.link.core.schedulers[0].preempted)
    assert held(one) == 0
