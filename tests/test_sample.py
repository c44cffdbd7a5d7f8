"""Sampling: the right distributions, streams that depend on seed and position alone, filters by their definitions."""

import math

import pytest
import torch
from torch import Tensor

from runtime_min.sample import ACCEPT, TOKEN, Rows, Sampling, draw, penalised, probabilities, uniform
from runtime_min.sampler import Row, Sampler

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)


def rows(n: int, **knobs: float) -> Rows:
    k = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | knobs
    return Rows(
        seeds=torch.arange(n) * 77,
        positions=torch.arange(n),
        knobs=torch.tensor([list(k.values())] * n, dtype=torch.float64),
        filtered=bool(k["top_k"] or k["top_p"] < 1),
    )


def kept(**knobs: float) -> Tensor:
    return probabilities(LOGITS[None], rows(1, **knobs))[0]


def test_filters_keep_what_they_say() -> None:
    p = LOGITS.softmax(-1)
    two = torch.cat([p[:2] / p[:2].sum(), torch.zeros(2)])
    assert torch.allclose(kept(), p) and torch.allclose(kept(top_p=1 - 1e-9), p)
    assert torch.allclose(kept(top_p=0.7), two) and torch.allclose(kept(top_k=2), two)
    assert torch.allclose(kept(min_p=math.exp(-1) - 1e-9), two)
    assert torch.allclose(kept(top_k=1), torch.eye(4, dtype=torch.float64)[0])
    assert torch.allclose(kept(top_p=1e-9), torch.eye(4, dtype=torch.float64)[0])
    assert torch.allclose(kept(temperature=0.5), (2 * LOGITS).softmax(-1))
    assert torch.allclose(kept(top_k=9), p)
    # After top_k the mass is one again: 0.7 of the two likeliest is the first alone (0.731).
    assert (kept(top_k=2, top_p=0.7) > 0).tolist() == [True, False, False, False]


def test_draws_follow_the_distribution() -> None:
    n = 40_000
    for knobs in ({}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 3, "min_p": 0.1}):
        want = kept(**knobs)
        share = torch.bincount(draw(LOGITS.expand(n, 4), rows(n, **knobs)), minlength=4) / n
        assert (share - want).abs().max() < 4 * math.sqrt(0.25 / n)


def test_random_numbers_depend_on_seed_position_and_stream_alone() -> None:
    seeds, positions = torch.tensor([1, 1, 2, 1]), torch.tensor([5, 6, 5, 5])
    u = uniform(seeds, positions, 1000)
    assert torch.equal(u[0], u[3]) and torch.equal(u[:1], uniform(seeds[:1], positions[:1], 1000))
    assert torch.equal(u[0, :10], uniform(seeds[:1], positions[:1], 10)[0])
    other = uniform(seeds, positions, 1000, ACCEPT)
    pairs = [(u[0], u[1]), (u[0], u[2]), (u[0], other[0]), (u[0, 1:], u[0, :-1])]
    for a, b in pairs:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / math.sqrt(1000)
    many = uniform(torch.arange(300), torch.zeros(300, dtype=torch.int64), 300, TOKEN).flatten()
    assert many.min() > 0 and many.max() < 1 and abs(float(many.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / 90_000)


def test_penalties_by_their_definition() -> None:
    counts = torch.tensor([[0, 2, 0, 0]])
    seen = torch.tensor([[True, True, False, False]])
    weights = torch.tensor([[0.5, 0.25, 2.0]], dtype=torch.float64)
    assert penalised(LOGITS[None], counts, seen, weights)[0].tolist() == [1.0, 0.5 - 0.5 - 0.5, 0.0, -1.0]


def test_a_row_that_is_not_finite_is_told_and_harms_no_other() -> None:
    sampler = Sampler(4, 4, torch.device("cpu"))
    asked = [Row(sampling=Sampling(temperature=1.0, logprobs=2), seed=i, position=3, slot=i) for i in range(3)]
    logits = LOGITS.repeat(3, 1)
    whole = sampler(logits, asked, 2, lambda x: x)
    for bad in (float("nan"), float("inf")):
        logits[1, 2] = bad
        found = sampler(logits, asked, 2, lambda x: x)
        assert found[:, 1].tolist() == [1, 0, 1] and torch.equal(found[[0, 2]], whole[[0, 2]])
        assert found.isfinite().all()
    assert sampler.last.tolist()[:3] == found[:, 0].tolist()


def test_greedy_takes_the_first_of_equals() -> None:
    sampler = Sampler(1, 3, torch.device("cpu"))
    row = Row(sampling=Sampling(), seed=0, position=0, slot=0)
    assert sampler(torch.tensor([[1.0, 3.0, 3.0]]), [row], None, lambda x: x)[0, 0] == 1


@pytest.mark.gpu
def test_a_gpu_draws_the_same_numbers() -> None:
    seeds, positions = torch.arange(50) * (1 << 55), torch.arange(50)
    assert torch.equal(uniform(seeds, positions, 999), uniform(seeds.cuda(), positions.cuda(), 999).cpu())
