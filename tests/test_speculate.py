"""Drafts in the engine: whatever they propose, every request gives what it gives alone."""

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime_min.core import Core
from runtime_min.engine import Engine
from runtime_min.graphs import Graphs
from runtime_min.kv import batch
from runtime_min.messages import Event
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Sequence
from runtime_min.request import Limits, Media, Request, RequestError
from runtime_min.sample import Rows, Sampling, probabilities
from runtime_min.sampler import Guess
from runtime_min.speculate.draft import Asked, Proposal
from runtime_min.speculate.open import SpeculationError
from tests.engines import DIMS, alone, held, tiny
from tests.speculating import KINDS, Scripted, answers, real, speculating, target
from tests.test_engine import Rows as Pictures
from tests.test_engine import requests

SMALL = Limits(running=6, step_tokens=48, share=8, cache_tokens=200, page_tokens=4, spec_adaptive=False)
ROOM = replace(SMALL, cache_tokens=2000)
SLOW = pytest.mark.slow
# The kinds that differ most, and in the slow tier all.
SOME = ["dflash", "eagle3.1", pytest.param("eagle3 llama", marks=SLOW), pytest.param("eagle3 mla", marks=SLOW)]


def greedy(count: int, seed: int) -> list[Request]:
    return [replace(r, sampling=replace(r.sampling, temperature=0.0)) for r in requests(count, seed)]


@cache
def _alone(model: Decoder, request: Request) -> list[int]:
    return alone(model, request, request.sampling.seed or 0)


def knowing(model: Decoder, asked: list[Request], quality: float, **how: Any) -> tuple[Scripted, list[list[int]]]:
    """A draft that knows the answers this well, and the answers."""
    want = [_alone(model, r) for r in asked]
    return Scripted(answers([[*r.prompt, *w] for r, w in zip(asked, want, strict=True)], quality), **how), want


def core(engine: Engine) -> Core:
    return engine.link.core  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("tree", [0, 9])
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("k", [1, pytest.param(2, marks=SLOW), 3, pytest.param(5, marks=SLOW), 8])
def test_greedy_answers_are_those_of_plain_decoding(k: int, quality: float, tree: int) -> None:
    """With penalties and biases, through a cache so small that requests are preempted and pages evicted."""
    asked = greedy(30, 1)
    draft, want = knowing(tiny(), asked, quality)
    one = speculating(draft, replace(SMALL, spec_tokens=k, spec_tree=tree))
    results = one.generate(asked)
    assert [r.ids for r in results] == want and held(one) == 0
    assert all(r.finish == ("stop" if r.ids[-1] in a.stops else "length") for r, a in zip(results, asked, strict=True))
    found = one.stats.drafts
    assert found is not None and found.drafts and found.accepted == sum(found.accepted_at)
    assert max(found.length, 1.05) >= 1 + 0.4 * quality * min(k, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*sorted(KINDS), "perfect", "mediocre", "random"])
def test_a_thousand_greedy_prompts(kind: str) -> None:
    """K from 1 to 8, chains and trees in turn."""
    for i, (k, tree) in enumerate(product(range(1, 9), (0, 12))):
        asked = greedy(63, 100 + i)
        limits = replace(SMALL, spec_tokens=min(k, 3) if kind == "dflash" else k, spec_tree=tree)
        if kind in KINDS:
            one, want = speculating(real(kind), limits, target()), [alone(target(), r, 0) for r in asked]
        else:
            draft, want = knowing(tiny(), asked, {"perfect": 1.0, "mediocre": 0.6, "random": 0.0}[kind])
            one = speculating(draft, limits)
        assert [r.ids for r in one.generate(asked)] == want, (k, tree)


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=SLOW)])
@pytest.mark.parametrize("tree", [0, 9])
def test_mixed_requests_each_as_without_drafts(count: int, tree: int) -> None:
    """Greedy, sampled, penalised, with log-probabilities, some of them plain; certain drafts leave all of it alone."""
    asked = [replace(r, draft=i % 5 > 0) for i, r in enumerate(requests(count, 1))]
    draft, want = knowing(tiny(), asked, 0.7)
    one = speculating(draft, replace(SMALL, spec_tokens=4, spec_tree=tree))
    results = one.generate(asked)
    assert [r.ids for r in results] == want
    assert not {id for id, _ in draft.asked} & {i for i in range(count) if i % 5 == 0}
    plain = Engine.over(Core(tiny(), SMALL)).generate(asked)
    for a, b in zip(results, plain, strict=True):
        assert len(a.logprobs) == len(b.logprobs)
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.token == y.token and x.logprob == pytest.approx(y.logprob, abs=1e-9)
            assert dict(x.top) == pytest.approx(dict(y.top), abs=1e-9)
    assert core(one).schedulers[0].preempted > 2 and sum(r.cached > 0 for r in results) > 3 and held(one) == 0


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("tree", [0, 7, pytest.param(30, marks=SLOW)])
def test_drafts_with_weights(kind: str, tree: int) -> None:
    asked = greedy(14, 1)
    want = [alone(target(), r, 0) for r in asked]
    one = speculating(real(kind), replace(SMALL, spec_tokens=3, spec_tree=tree), target())
    assert [r.ids for r in one.generate(asked)] == want and held(one) == 0


@pytest.mark.parametrize("kind", SOME)
def test_a_draft_s_state_is_that_of_a_cold_start(kind: str) -> None:
    """What is proposed depends on the text alone: not on chunks, prefix hits, preemption or who else is there."""

    class Heard:
        def __init__(self) -> None:
            self.inner = real(kind)
            self.said: dict[tuple[int, ...], list[int]] = {}
            self.compared = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def propose(self, asked: list[Asked], guess: Guess) -> Proposal:
            found = self.inner.propose(asked, guess)
            tokens = found.tokens.tolist()
            for a in asked:
                mine, tokens = tokens[: a.count], tokens[a.count :]
                self.compared += tuple(a.active.tokens) in self.said
                before = self.said.setdefault(tuple(a.active.tokens), mine)
                shared = min(len(before), len(mine))
                assert before[:shared] == mine[:shared]
            return found

    asked = [
        replace(r, sampling=Sampling(), stops=frozenset(), max_tokens=16)
        for r in requests(14, 3)
    ]  # fmt: skip
    cold = Heard()
    for r in asked:
        speculating(cold, replace(ROOM, spec_tokens=3), target()).generate([r])  # type: ignore[arg-type]
    small = Heard()
    small.said = dict(cold.said)
    one = speculating(small, replace(SMALL, spec_tokens=3, step_tokens=20, cache_tokens=100), target())  # type: ignore[arg-type]
    for _ in range(2):
        results = one.generate(asked)
    assert core(one).schedulers[0].preempted > 0 and sum(r.cached > 0 for r in results) > 3
    assert small.compared > 150


def test_a_perfect_draft_gives_k_and_one_tokens_a_step() -> None:
    for k in (1, 3, 7):
        asked = [Request(prompt=(5, i), max_tokens=1 + 4 * (k + 1)) for i in range(3)]
        draft, want = knowing(tiny(), asked, 1.0)
        one = speculating(draft, replace(ROOM, spec_tokens=k))
        heard: list[int] = []
        results = one.generate(asked, listen=lambda _, e: heard.append(len(e.tokens)))  # noqa: B023
        assert [r.ids for r in results] == want and heard == [1] * 3 + [k + 1] * 12
        found = one.stats.drafts
        assert found is not None and found.length == k + 1 and found.rate == 1 and found.drafts == 12


def test_near_the_end_of_budget_and_context_fewer_are_drafted() -> None:
    for tree in (0, 20):
        asked = [Request(prompt=tuple(range(1, 1 + n)), max_tokens=16 - n) for n in (3, 9, 13, 14, 15)]
        draft, want = knowing(tiny(), asked, 1.0)
        one = speculating(draft, replace(ROOM, spec_tokens=5, spec_tree=tree, context=16, cache_tokens=16, running=1))
        results = one.generate(asked)
        assert [r.ids for r in results] == want and all(r.finish == "length" for r in results)
        if not tree:
            # Never more than one less than what is left.
            assert [count for _, count in draft.asked] == [5, 5, 5, 1]
            assert one.stats.drafts is not None and one.stats.drafts.draft_tokens == 16


def test_a_stop_inside_a_run_comes_first_and_only_what_is_given_counts() -> None:
    prompt = (9, 9, 4)
    text = alone(tiny(), Request(prompt=prompt, max_tokens=12), 0)
    at = next(i for i in range(2, 9) if text.index(text[i]) == i)
    asked = Request(prompt=prompt, max_tokens=12, stops=frozenset({text[at]}))
    one = speculating(Scripted(answers([[*prompt, *text]], 1.0)), replace(ROOM, spec_tokens=10))
    (result,) = one.generate([asked])
    assert result.ids == text[: at + 1] and result.finish == "stop"
    found = one.stats.drafts
    assert found is not None and found.accepted == at and found.draft_tokens == 10
    both = replace(asked, max_tokens=at + 1)
    assert one.generate([both])[0].finish == "stop"


class Grammar:
    """After an even token only odd ones may come, and the other way round."""

    def mask(self, output: list[int]) -> Tensor:
        even = not output or output[-1] % 2 == 1
        word = torch.tensor([0x55555555 if even else -0x55555556], dtype=torch.int32)
        return word.expand(DIMS.vocab // 32)

    def behind(self, output: list[int], drafted: list[int]) -> Tensor:
        return self.mask([*output, *drafted])


def test_grammars_limit_every_place_of_a_run() -> None:
    for tree in (0, 9):
        asked = [Request(prompt=(3, i), max_tokens=14, grammar="any") for i in range(4)]
        plain = Engine.over(Core(tiny(), ROOM, constrain=lambda _: Grammar())).generate(asked)
        want = [r.ids for r in plain]
        assert all((a + b) % 2 for ids in want for a, b in pairwise(ids))
        for quality in (0.5, 1.0):
            draft = Scripted(answers([[*r.prompt, *w] for r, w in zip(asked, want, strict=True)], quality))
            limits = replace(ROOM, spec_tokens=4, spec_tree=tree)
            one = Engine.over(Core(tiny(), limits, constrain=lambda _: Grammar(), draft=draft))
            assert [r.ids for r in one.generate(asked)] == want
            assert one.stats.drafts is not None and one.stats.drafts.length > 1.3


def test_prompts_in_pieces_with_pictures_and_scores() -> None:
    """Look-ahead tokens inside a picture, and a request that wants its prompt's log-probabilities."""
    model = target()
    media = Media(position=7, tokens=12, digest=b"p", item=model.embed[list(range(20, 32))])
    asked = [Request(prompt=tuple(range(40, 70)), max_tokens=6, media=(media,)) for _ in range(2)]
    asked.append(Request(prompt=tuple(range(3, 30)), max_tokens=5, sampling=Sampling(logprobs=1), scored=True))
    limits = replace(ROOM, step_tokens=10, pictures=14, spec_tokens=3)
    want = Engine.over(Core(model, limits, Pictures())).generate(asked)
    for kind in sorted(KINDS):
        one = Engine.over(Core(model, limits, Pictures(), draft=real(kind)))
        for found in (one.generate(asked), one.generate(asked)):
            assert [r.ids for r in found] == [r.ids for r in want]
            assert [s.token for s in found[2].scored] == [s.token for s in want[2].scored]


def test_cancels_leak_nothing() -> None:
    for tree in (0, 9):
        asked = greedy(30, 5)
        draft, _ = knowing(tiny(), asked, 0.5)
        one = speculating(draft, replace(SMALL, spec_tokens=4, spec_tree=tree))
        for a in asked:
            one.submit(a)
        ended: dict[int, Event] = {}
        while one.unfinished:
            for event in one.step():
                ended |= {event.id: event} if event.finish else {}
            if len(ended) % 3 == 0:
                one.cancel(min(one.unfinished, default=0))
        assert len(ended) == 30 and any(e.finish == "cancelled" for e in ended.values()) and held(one) == 0


def test_what_is_not_finite_ends_its_own_request_only_and_a_poisonous_draft_none() -> None:
    model = tiny()
    kept = model.embed[99].clone()
    model.embed[99] = float("nan")
    try:
        good = [
            replace(r, sampling=replace(r.sampling, bias=((99, -1e9),)), stops=frozenset())
            for r in greedy(12, 6)
            if 99 not in r.prompt
        ]
        want = [alone(model, r, 0) for r in good]
        bad = replace(good[0], prompt=(*good[0].prompt, 5, 99, 7, 8), max_tokens=9)
        texts = [[*r.prompt, *w] for r, w in zip([bad, *good], [[], *want], strict=True)]
        one = speculating(Scripted(answers(texts, 1.0)), replace(ROOM, spec_tokens=3))
        results = one.generate([bad, *good])
        assert results[0].finish == "error" and "not finite" in str(results[0].error)
        assert [r.ids for r in results[1:]] == want and held(one) == 0
        poison = Scripted(lambda tokens, id, count: [99] * count)
        one = speculating(poison, replace(ROOM, spec_tokens=3))
        assert [r.ids for r in one.generate(good)] == want and held(one) == 0
    finally:
        model.embed[99] = kept


def test_drawn_drafts_keep_the_distribution_of_whole_texts() -> None:
    """Three tokens of two likely ones each, by exact probabilities."""
    model, prompt, n = tiny(), (17, 3, 5), 3000
    hot = Sampling(temperature=1.2, top_k=2)
    want: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, p in want.items():
            cache = model.cache(64)
            logits = model.forward(batch(cache, [(Sequence(), [*prompt, *text])]), cache)
            how = Rows(
                seeds=torch.zeros(1, dtype=torch.int64), positions=torch.zeros(1, dtype=torch.int64),
                knobs=torch.tensor([[1.2, 2, 1, 0]]).double(), filtered=True,
            )  # fmt: skip
            d = probabilities(logits, how)[0]
            longer |= {(*text, int(t)): p * float(d[t]) for t in d.nonzero()[:, 0]}
        want = longer
    guess = max(want, key=lambda text: want[text])
    draft = Scripted(lambda tokens, id, count: [*guess[len(tokens) - 3 :], *[0] * count][:count], drawn=True)
    limits = replace(ROOM, running=64, step_tokens=512, cache_tokens=4000, spec_tokens=2)
    one = speculating(draft, limits)
    asked = [Request(prompt=prompt, max_tokens=3, sampling=replace(hot, seed=i * 31 + 7)) for i in range(n)]
    found: dict[tuple[int, ...], int] = dict.fromkeys(want, 0)
    for r in one.generate(asked):
        found[tuple(r.ids)] += 1
    chi = sum((found[t] - n * p) ** 2 / (n * p) for t, p in want.items())
    assert len(want) == 8 and chi < 7 + 4 * math.sqrt(14)
    drafts = one.stats.drafts
    assert drafts is not None and 0.1 < drafts.rate < 0.95


@pytest.mark.parametrize("tree", [False, True])
def test_a_captured_verify_step_gives_states_and_rows_of_the_eager_one(tree: bool) -> None:
    """The tensors that a graph replays, run eagerly: taps, trees, padding that writes nothing."""
    model = target()
    cache = model.cache(400, 4)
    made = Graphs(model, cache, (4, 8), 4, 40, (0, 2), tree)
    for real_tokens in (3, 7, 8):
        n = made.size(real_tokens)
        assert n is not None
        work, left = [], real_tokens
        while left:
            sequence, count = Sequence(), min(left, 3)
            cache.grow(sequence, 5)
            sequence.length = 5
            work.append((sequence, [7 + i for i in range(count)]))
            left -= count
        cache.rows[:, 4:].normal_()
        parents: Any = [[-1, 0, 0][: len(ids)] for _, ids in work] if tree else []
        step = batch(cache, work, list(range(real_tokens)), n - real_tokens, parents=parents)
        assert made.fill(step) == n
        before = cache.rows.clone()
        logits, states = model.tapped(made.batch(n), cache, taps=made.taps)
        after = cache.rows.clone()
        cache.rows.copy_(before)
        plain = [(Sequence(s.pages, s.length - len(ids)), ids) for s, ids in work]
        want, tapped = model.tapped(batch(cache, plain, list(range(real_tokens)), parents=parents), cache, taps=(0, 2))
        assert states is not None and tapped is not None and tapped.shape[1] == 2 * DIMS.hidden
        assert (logits[:real_tokens] - want).abs().max() < 1e-9
        assert (states[:real_tokens] - tapped).abs().max() < 1e-9 and torch.allclose(after, cache.rows)
        for sequence, _ in work:
            cache.pool.release(sequence)


def test_taps_are_the_stream_between_layers() -> None:
    """What is tapped after a layer is what a model of those layers alone ends with, before its last norm."""
    model, cache = target(), target().cache(64)
    step = batch(cache, [(Sequence(), [4, 5, 6])])
    _, states = model.tapped(step, cache, taps=(0, 2))
    assert states is not None
    last = model.ops.rmsnorm(states[:, DIMS.hidden :], model.norm, model.dims.norm_eps)
    want = model.forward(step, cache)
    assert torch.allclose(model.ranks.join(model.ops.linear(last[step.last], model.head)), want)
    assert not torch.allclose(states[:, : DIMS.hidden], states[:, DIMS.hidden :])


def test_useless_drafts_are_told_once_and_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    asked = greedy(60, 9)
    draft, want = knowing(tiny(), asked, 0.0)
    one = speculating(draft, replace(ROOM, spec_tokens=3))
    assert [r.ids for r in one.generate(asked)] == want
    assert capsys.readouterr().err.count("drafts are useless here") == 1
    draft, _ = knowing(tiny(), asked, 0.0)
    one = speculating(draft, replace(ROOM, spec_tokens=3, spec_adaptive=True))
    assert [r.ids for r in one.generate(asked)] == want
    assert len(draft.asked) < 150


def test_adaptive_drafting_costs_next_to_nothing_or_gives_all() -> None:
    """Steps over 512 tokens: with nothing accepted about as many as without, with everything as with a fixed count."""
    request = Request(prompt=(1, 2, 3), max_tokens=512)
    limits = replace(ROOM, spec_tokens=3, spec_adaptive=True)
    for quality, most in ((0.0, 10), (1.0, 130)):
        draft, want = knowing(tiny(), [request], quality)
        one = speculating(draft, limits)
        assert one.generate([request])[0].ids == want[0]
        assert (len(draft.asked) <= most) and (quality == 0 or len(draft.asked) >= 128)


@pytest.mark.parametrize("kind", SOME)
def test_what_a_draft_launches_can_be_warmed(kind: str) -> None:
    real(kind).warm(8)


def test_what_cannot_be_drafted_is_refused() -> None:
    with pytest.raises(RequestError, match=r"16 tokens drafted in a row, expected 1\.\.15"):
        Limits(spec_tokens=16)
    with pytest.raises(RequestError, match=r"a tree of 64 nodes, expected 0\.\.63"):
        Limits(spec_tree=64)
    with pytest.raises(SpeculationError, match="found 5, this draft proposes at most 3"):
        speculating(real("dflash"), replace(ROOM, spec_tokens=5), target())
