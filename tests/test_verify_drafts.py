"""Verification without a model: hand-written distributions, counters by their definitions, distributions preserved."""

import math

import pytest
import torch
from torch import Tensor

from runtime_min.request import WIDTH
from runtime_min.sample import ACCEPT, DRAFT, RESIDUAL, TOKEN, Rows, Sampling, draw, probabilities, uniform
from runtime_min.sampler import Nodes, Row, Sampler
from runtime_min.speculate.draft import chain
from runtime_min.speculate.figures import Acceptance
from runtime_min.speculate.pace import PATIENCE, Own, Pace
from runtime_min.speculate.trees import best_first
from runtime_min.speculate.verify import judged, until, walk

N = 200_000
P = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05, 0.0], dtype=torch.float64)
Q = torch.tensor([0.1, 0.3, 0.1, 0.2, 0.1, 0.2], dtype=torch.float64)


def rows(n: int, position: int = 7, **knobs: float) -> Rows:
    k = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | knobs
    return Rows(
        seeds=torch.arange(n) * 7919 + 3,
        positions=torch.full((n,), position),
        knobs=torch.tensor([list(k.values())] * n, dtype=torch.float64),
        filtered=bool(k["top_k"] or k["top_p"] < 1),
    )


def same(found: Tensor, want: Tensor) -> bool:
    """Outcomes [n] follow `want`: total variation within three standard errors, chi-squared within four."""
    n, flat = len(found), want.flatten()
    share = torch.bincount(found, minlength=len(flat)) / n
    error = 0.5 * (flat * (1 - flat) / n).sqrt().sum()
    seen = flat > 0
    chi = (n * (share - flat)[seen] ** 2 / flat[seen]).sum()
    free = int(seen.sum()) - 1
    good = 0.5 * (share - flat).abs().sum() < 3 * error and chi < free + 4 * math.sqrt(2 * free)
    return bool(good) and not bool(share[~seen].any())


def verified(p: Tensor, q: Tensor, how: Rows) -> tuple[Tensor, Tensor]:
    """Drafts drawn from q, and what comes out for them. p, q [V] or [n, V]."""
    n = len(how.seeds)
    p, q = (d.expand(n, -1) for d in (p, q))
    drafts = draw(q.log(), how, DRAFT)
    return drafts, judged(p, q, drafts, how.seeds, how.positions)


@pytest.mark.parametrize("p, q", [(P, Q), (Q, P), (P, P), (P, torch.full((6,), 1 / 6).double()), (P, P.flip(0))])
def test_what_comes_out_is_the_target_s_and_acceptance_is_the_overlap(p: Tensor, q: Tensor) -> None:
    drafts, out = verified(p, q, rows(N))
    assert same(drafts, q) and same(out, p)
    overlap = float(torch.minimum(p, q).sum())
    assert abs(float((drafts == out).double().mean()) - overlap) <= 4 * math.sqrt(overlap * (1 - overlap) / N) + 1e-12


def test_filters_act_on_both_sides() -> None:
    generator = torch.Generator().manual_seed(2)
    target, draft = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    for knobs in ({"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 1.5, "top_k": 5, "min_p": 0.1}):
        how = rows(N, **knobs)
        p, q = (probabilities(logits.expand(N, -1), how) for logits in (target, draft))
        drafts = draw(draft.expand(N, -1), how, DRAFT)
        assert same(judged(p, q, drafts, how.seeds, how.positions), p[0])


def test_a_certain_draft_is_accepted_as_often_as_the_target_says_it() -> None:
    for token in range(5):
        q = torch.eye(6, dtype=torch.float64)[token]
        drafts, out = verified(P, q, rows(N))
        assert bool((drafts == token).all()) and same(out, P)


def test_two_tokens_together_in_a_run_or_in_two_rounds() -> None:
    """The second is drafted behind the drafted first; where that is refused, again in a round of its own, with the
    numbers of the same position."""
    generator = torch.Generator().manual_seed(3)
    second = torch.rand(6, 6, dtype=torch.float64, generator=generator).softmax(-1) ** 2
    second /= second.sum(-1, keepdim=True)
    guess = torch.rand(6, 6, dtype=torch.float64, generator=generator).softmax(-1)
    one, two = rows(N), rows(N, 8)
    drafts, first = verified(P, Q, one)
    _, run = verified(second[drafts], guess[drafts], two)
    _, again = verified(second[first], guess[first], two)
    out = torch.where(drafts == first, run, again)
    assert same(6 * first + out, P[:, None] * second)


def test_wrong_rules_are_found() -> None:
    """Drafts compared with a draw of the target's; the same numbers to draft and to replace; always accepted."""
    how = rows(N)
    drafts, _ = verified(P, Q, how)
    p, q = P.expand(N, -1), Q.expand(N, -1)
    shared = uniform(how.seeds, how.positions, 6, DRAFT)
    accepted = (
        uniform(how.seeds, how.positions, 1, DRAFT)[:, 0] * q.gather(1, drafts[:, None])[:, 0]
        < (p.gather(1, drafts[:, None])[:, 0])
    )
    left = (p - q).clamp(min=0).log() - (-shared.log()).log()
    assert not same(torch.where(accepted, drafts, left.argmax(-1)), P)
    assert not same(drafts, P)
    residual = draw((P - Q).clamp(min=0).log().expand(N, -1), how, TOKEN)
    refused = drafts != draw(P.log().expand(N, -1), how)
    assert not same(torch.where(refused, residual, drafts), P)


def test_streams_say_nothing_about_each_other() -> None:
    how = rows(20_000)
    numbers = torch.stack([uniform(how.seeds, how.positions, 1, s)[:, 0] for s in (TOKEN, DRAFT, ACCEPT, RESIDUAL)])
    off = torch.corrcoef(numbers) - torch.eye(4, dtype=torch.float64)
    assert off.abs().max() < 4 / math.sqrt(20_000)


def test_siblings_of_a_tree_leave_the_target_s_distribution() -> None:
    """The target draws behind every node; the path follows. Acceptance is the target's mass on the siblings."""
    how = rows(N)
    first = draw(P.log().expand(N, -1), how)
    children = torch.tensor([1, 0, 3])
    hit = (first[:, None] == children).any(-1)
    assert abs(float(hit.double().mean()) - float(P[children].sum())) < 4 * math.sqrt(0.25 / N)
    behind = torch.stack([P.roll(int(i)) for i in range(6)])
    second = draw(behind[first].log(), rows(N, 8))
    assert same(6 * first + second, P[:, None] * behind)


TREE = [-1, 0, 0, 1, 1, 2, 4]
BEAR = [0, 5, 6, 7, 8, 9, 3]


@pytest.mark.parametrize(
    "chosen, path",
    [
        ([4, 0, 0, 0, 0, 0, 0], [0]), ([5, 8, 0, 0, 3, 0, 1], [0, 1, 4, 6]), ([5, 7, 9, 0, 3, 0, 1], [0, 1, 3]),
        ([6, 8, 9, 0, 3, 2, 1], [0, 2, 5]), ([5, 9, 9, 0, 3, 0, 1], [0, 1]), ([6, 7, 8, 0, 0, 0, 0], [0, 2]),
    ],
)  # fmt: skip
def test_paths_follow_what_was_chosen(chosen: list[int], path: list[int]) -> None:
    assert walk(chosen, BEAR, TREE) == path


def test_chains_by_hand() -> None:
    """All, the first, the middle, none; and the cut at a stop."""
    bear = [0, 4, 5, 6]
    for chosen, run in (
        ([4, 5, 6, 7], [4, 5, 6, 7]), ([9, 5, 6, 7], [9]), ([4, 9, 6, 7], [4, 9]), ([4, 5, 1, 7], [4, 5, 1]),
    ):  # fmt: skip
        assert [chosen[i] for i in walk(chosen, bear, chain(3))] == run
    assert until({5}, [4, 5, 6]) == [4, 5] and until((), [4, 5]) == [4, 5]


def test_the_sampler_judges_mixed_chains() -> None:
    """Greedy and drawn chains and a plain row in one step; what it chose is what the rules say."""
    sampler, v, r = Sampler(8, 6, torch.device("cpu")), 6, torch.Generator().manual_seed(4)
    logits = torch.randn(7, v, dtype=torch.float64, generator=r)
    scores = torch.randn(2, 1, v, dtype=torch.float64, generator=r)
    hot = Sampling(temperature=0.8, top_k=4)
    asked = [
        *(Row(sampling=Sampling(), seed=1, position=5 + i, slot=0, behind=tuple(range(1, i + 1))) for i in range(3)),
        Row(sampling=hot, seed=2, position=9, slot=1),
        *(Row(sampling=hot, seed=3, position=5 + i, slot=2, behind=tuple(range(5, 5 + i))) for i in range(3)),
    ]
    bear = torch.tensor([0, int(logits[0].argmax()), 2, 0, 0, 3, 1])
    nodes = Nodes(
        tokens=bear, parents=torch.tensor([-1, 0, 1, 0, -1, 0, 1]), drawn=[([4], scores[0]), ([5], scores[1])]
    )
    found = sampler(logits, asked, None, lambda x: x, nodes)
    assert found[:3, 0].tolist() == logits[:3].argmax(-1).tolist()
    assert found[:, 3].tolist() == bear.tolist() and found[:, 4].tolist() == nodes.parents.tolist()
    how = Rows(
        seeds=torch.tensor([3, 3]), positions=torch.tensor([5, 6]), knobs=torch.tensor([[0.8, 4, 1, 0]] * 2).double(),
        filtered=True,
    )  # fmt: skip
    p, q = probabilities(logits[4:6], how), probabilities(scores[:, 0], how)
    assert found[4:6, 0].tolist() == judged(p, q, bear[5:7], how.seeds, how.positions).tolist()
    # What is kept on the device is that of the plain row alone.
    assert sampler.last.tolist()[:3] == [0, int(found[3, 0]), 0]


def test_counters_by_their_definitions() -> None:
    found = Acceptance()
    for accepted in (3, 0, 1, 2, 3):
        found = found.plus(3, accepted)
    assert found.rate == pytest.approx(0.6) and found.length == pytest.approx(2.8)
    assert found.rates == pytest.approx((0.8, 0.6, 0.4)) and found.conditional == pytest.approx((0.8, 0.75, 2 / 3))
    later = found.plus(2, 2).took(1.0, 2.0)
    assert later.since(found).facts() == Acceptance().plus(2, 2).took(1.0, 2.0).facts() | {
        "per_position": [1.0, 1.0, 0.0], "conditional": [1.0, 1.0, 0.0],
    }  # fmt: skip
    assert sum(found.rates) == pytest.approx(found.accepted / found.drafts)
    assert found.warning() is None


def test_a_useless_draft_is_told_once_there_is_enough() -> None:
    found = Acceptance()
    for i in range(300):
        assert (found.warning() is not None) == (i >= 256)
        found = found.plus(3, 0)
    assert "id table" in str(found.warning())


def test_best_first_trees_hold_the_likeliest_paths() -> None:
    """Against all paths by brute force."""
    generator = torch.Generator().manual_seed(5)
    for count in (1, 5, 17, 40):
        p = torch.randn(4, WIDTH, dtype=torch.float64, generator=generator).log_softmax(-1)
        worth, ids = p.sort(-1, descending=True)
        tokens, parents = best_first(worth.tolist(), ids.tolist(), count)
        assert len(tokens) == count and all(parent < i for i, parent in enumerate(parents))
        paths = [()]
        for token, parent in zip(tokens, parents[1:], strict=True):
            paths.append((*paths[parent], token))
        every = [()]
        for _ in range(4):
            every += [(*path, t) for path in every for t in range(WIDTH) if (*path, t) not in every]
        best = sorted({e for e in every if e}, key=lambda e: -sum(float(p[i, t]) for i, t in enumerate(e)))
        assert set(paths[1:]) == set(best[:count])


def test_the_pace_follows_acceptance_and_batch() -> None:
    def pace(nodes: int = 0) -> Pace:
        return Pace(tokens=5, nodes=nodes, ahead=1, adaptive=True)

    for nodes in (0, 16):
        good, bad, one = Own(), Own(), pace(nodes)
        for _ in range(20):
            one.heard(good, 5, 5)
        assert one.count(good, 100, 1) == (nodes // 2 or 5) and one.count(good, 3, 1) == (nodes // 4 or 3)
        assert 1 <= one.count(good, 1, 1) <= (WIDTH if nodes else 1) and one.count(good, 0, 1) == 0
        one = pace(nodes)
        for _ in range(12):
            bad, steps = Own(), 0
            while not one.gives_up(bad):
                if one.count(bad, 100, 1):
                    one.heard(bad, 0, 5)
                steps += 1
            assert PATIENCE <= steps < 16
        # Then only one request in sixteen tries.
        assert 0 < sum(one.begins() for _ in range(64)) <= 5
    middling, one = Own(), pace()
    for _ in range(20):
        one.heard(middling, 1, 5)
    alone, many = (one.count(middling, 100, n) for n in (1, 64))
    assert many < alone <= 5
    fixed = Pace(tokens=5, nodes=0, ahead=1, adaptive=False)
    fixed.heard(bad, 0, 5)
    assert fixed.begins() and fixed.count(bad, 100, 64) == 5
