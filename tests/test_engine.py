"""The engine: every request as if it were alone, whatever runs beside it, fails, is cancelled or comes back."""

import random
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime_min.core import Core
from runtime_min.engine import Engine, EngineError
from runtime_min.graphs import Graphs
from runtime_min.kv import batch
from runtime_min.messages import Event
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Sequence
from runtime_min.request import Limits, Media, Request, RequestError
from runtime_min.sample import Sampling, SamplingError
from runtime_min.scheduler import Scheduler
from tests.engines import DIMS, alone, held, tiny

SMALL = Limits(running=6, step_tokens=24, share=8, cache_tokens=160, page_tokens=4)


def engine(limits: Limits = SMALL, model: Decoder | None = None) -> Engine:
    return Engine.over(Core(model or tiny(), limits))


def requests(count: int, seed: int) -> list[Request]:
    """Prompts of 1 to 60 tokens, many of which begin alike, and every kind of sampling."""
    r = random.Random(seed)
    shared = [[r.randrange(DIMS.vocab) for _ in range(40)] for _ in range(3)]
    out = []
    for i in range(count):
        prompt = shared[i % 3][: r.choice((0, 4, 17, 40))] + [r.randrange(DIMS.vocab) for _ in range(r.randint(1, 20))]
        sampling = Sampling(
            temperature=r.choice((0.0, 0.5, 1.0)),
            top_k=r.choice((0, 0, 5)),
            top_p=r.choice((1.0, 0.8)),
            min_p=r.choice((0.0, 0.0, 0.05)),
            presence=r.choice((0.0, 0.0, 0.7)),
            frequency=r.choice((0.0, 0.0, 0.3)),
            repetition=r.choice((1.0, 1.0, 1.3)),
            bias=((r.randrange(DIMS.vocab), 3.0),) if r.random() < 0.2 else (),
            seed=r.randrange(1 << 62),
            logprobs=r.choice((None, None, 0, 3)),
        )
        stops = frozenset(r.sample(range(DIMS.vocab), 4)) if r.random() < 0.3 else frozenset()
        out.append(Request(prompt=tuple(prompt), max_tokens=r.randint(1, 24), sampling=sampling, stops=stops))
    return out


@pytest.mark.parametrize("count", [40, 200])
def test_every_request_gives_what_it_gives_alone(count: int) -> None:
    """In random order through a cache so small that requests are preempted and pages evicted, twice over."""
    asked = requests(count, 1)
    want = [alone(tiny(), r, r.sampling.seed or 0) for r in asked]
    one = engine()
    for order in (range(count), random.Random(2).sample(range(count), count)):
        results = one.generate([asked[i] for i in order])
        for i, result in zip(order, results, strict=True):
            assert result.ids == want[i], i
            assert result.finish == ("stop" if result.ids[-1] in asked[i].stops else "length")
    scheduler = one.link.core.schedulers[0]  # type: ignore[attr-defined]
    assert scheduler.preempted > 3 and sum(r.cached > 0 for r in results) > 3
    assert held(one) == 0 and not one.unfinished


def test_log_probabilities_are_those_of_the_model() -> None:
    """Of every generated token and every prompt token, with the likeliest beside them, in every chunk."""
    prompt = tuple(range(3, 40))
    asked = Request(prompt=prompt, max_tokens=5, sampling=Sampling(temperature=0.8, seed=3, logprobs=2), scored=True)
    beside = requests(6, 9)
    result = engine().generate([*beside, asked])[-1]
    assert len(result.scored) == len(prompt) - 1 and len(result.logprobs) == 5
    text = [*prompt, *result.ids]
    for length, found in enumerate([*result.scored, *result.logprobs], start=1):
        (last,) = engine().generate([text[:length]], Sampling(logprobs=DIMS.vocab), max_tokens=1)
        whole = dict(last.logprobs[0].top)
        assert found.token == text[length] and found.logprob == pytest.approx(whole[found.token], abs=1e-9)
        assert dict(found.top) == pytest.approx(dict(last.logprobs[0].top[:2]))
        assert sum(torch.tensor(list(whole.values())).exp()) == pytest.approx(1)


def test_tokens_arrive_as_they_are_made() -> None:
    one, heard = engine(), []
    one.generate([[1, 2], [3]], max_tokens=3, listen=lambda place, event: heard.append((place, event.tokens)))
    assert [len(tokens) for _, tokens in heard] == [1] * 6 and [place for place, _ in heard[:4]] == [0, 1, 0, 1]


def test_random_cancels_leak_nothing_and_free_their_slots_within_a_step() -> None:
    one, r = engine(), random.Random(4)
    asked = requests(60, 5)
    ended: dict[int, Event] = {}
    cancelled: set[int] = set()
    ids = [one.submit(a) for a in asked]
    while one.unfinished:
        for event in one.step():
            ended |= {event.id: event} if event.finish else {}
        victims = [i for i in sorted(one.unfinished) if r.random() < 0.05]
        for i in victims:
            one.cancel(i)
        before = len(one.link.core.schedulers[0].running)  # type: ignore[attr-defined]
        for event in one.step():
            ended |= {event.id: event} if event.finish else {}
        assert not set(victims) & one.unfinished
        assert not any(a.id in victims for a in one.link.core.schedulers[0].running)  # type: ignore[attr-defined]
        assert before <= SMALL.running
        cancelled |= {i for i in victims if ended[i].finish == "cancelled"}
    assert len(ended) == 60 and 10 < len(cancelled) < 60
    want = {i: alone(tiny(), asked[i], asked[i].sampling.seed or 0) for i in ids[:5]}
    again = one.generate(asked[:5])
    assert [a.ids for a in again] == list(want.values()) and held(one) == 0


def test_a_request_that_is_not_finite_ends_alone_and_its_pages_are_not_found_again() -> None:
    """A token whose embedding is NaN poisons whatever sees it."""
    model = tiny()
    kept = model.embed[99].clone()
    model.embed[99] = float("nan")
    try:
        good = [
            replace(r, sampling=replace(r.sampling, bias=((99, -1e9),)))
            for r in requests(12, 6)
            if 99 not in r.prompt and not r.sampling.temperature
        ]
        want = [alone(model, r, 0) for r in good]
        bad = replace(good[0], prompt=(*good[0].prompt, 5, 99, 7, 8, 9, 10, 11, 12), max_tokens=9)
        one = engine(replace(SMALL, cache_tokens=400))
        results = one.generate([bad, *good, bad])
        for failed in (results[0], results[-1]):
            assert failed.finish == "error" and "not finite" in (failed.error or "") and not failed.ids
        assert [r.ids for r in results[1:-1]] == want
        again = one.generate([bad])[0]
        assert again.finish == "error" and again.cached <= len(good[0].prompt) and held(one) == 0
    finally:
        model.embed[99] = kept


def test_what_can_never_run_is_refused_with_numbers() -> None:
    one = engine(replace(SMALL, waiting=1, running=2))
    for request, said in (
        (Request(prompt=()), "is empty"),
        (Request(prompt=(1,), max_tokens=0), "max_tokens: found 0"),
        (Request(prompt=(1, 128)), "id 128 is outside the vocabulary 0..127"),
        (Request(prompt=(1,) * 150, max_tokens=11), "prompt of 150 and 11 new tokens exceed the 160 tokens"),
        (Request(prompt=(1,) * 4000, max_tokens=97), "exceed the context of 4096"),
    ):
        with pytest.raises(RequestError, match=said):
            one.submit(request)
    with pytest.raises(SamplingError, match="top_p: found 2"):
        Sampling(top_p=2)
    for _ in range(3):
        one.submit(Request(prompt=(1,)))
    with pytest.raises(RequestError, match="3 requests are under way, 3 are allowed"):
        one.submit(Request(prompt=(1,)))
    assert len(one.generate([[1]] * 2, max_tokens=2)) == 2


def test_requests_that_barely_fit_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step launches or reads something, although each request takes the whole cache."""
    one = engine(replace(SMALL, cache_tokens=40))
    asked = [Request(prompt=tuple(range(i, i + 25)), max_tokens=15) for i in range(5)]
    results = one.generate(asked)
    assert [r.ids for r in results] == [alone(tiny(), a, 0) for a in asked]
    assert one.link.core.schedulers[0].preempted > 0  # type: ignore[attr-defined]


def test_a_scheduler_that_finds_no_work_is_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "plan", lambda self: [])
    one = engine()
    with pytest.raises(EngineError, match="none of which can go on"):
        one.generate([[1, 2]])
    with pytest.raises(EngineError):
        one.submit(Request(prompt=(1,)))


def test_the_same_prompt_comes_from_the_cache_and_a_seed_repeats() -> None:
    one = engine(replace(SMALL, cache_tokens=400))
    prompt = tuple(range(30))
    sampling = Sampling(temperature=1.0, seed=11)
    first, second = (one.generate([prompt], sampling, max_tokens=8)[0] for _ in range(2))
    assert first.ids == second.ids and first.cached == 0 and second.cached == 28
    assert one.generate([prompt], Sampling(temperature=1.0, seed=12), max_tokens=8)[0].ids != first.ids
    other = one.generate([(*prompt[:9], 77, *prompt[10:])], max_tokens=1)[0]
    assert other.cached == 8


def test_pictures_stand_in_for_tokens_in_every_chunk_and_are_told_apart_in_the_cache() -> None:
    """Embeddings of other tokens, handed in as pictures, give what those tokens give."""
    model, encode = tiny(), Rows()
    one = Engine.over(Core(model, replace(SMALL, cache_tokens=400, step_tokens=10, pictures=14), encode))

    def asked(place: int, ids: list[int], digest: bytes = b"") -> tuple[Request, Request]:
        prompt = tuple(range(40, 70))
        media = Media(position=place, tokens=len(ids), digest=digest or bytes(ids), item=model.embed[ids])
        seen = (*prompt[:place], *ids, *prompt[place + len(ids) :])
        return Request(prompt=prompt, max_tokens=4, media=(media,)), Request(prompt=seen, max_tokens=4)

    pairs = [asked(*a) for a in ((0, [1, 2]), (7, list(range(12))), (7, list(range(20, 32))), (27, [5, 6, 7]))]
    want = [alone(model, text, 0) for _, text in pairs]
    assert [r.ids for r in one.generate([p for p, _ in pairs])] == want
    again = one.generate([p for p, _ in pairs])
    assert [r.ids for r in again] == want and [r.cached for r in again] == [28, 28, 28, 28]
    rows = one.link.core.runner.embeddings.rows  # type: ignore[attr-defined]
    assert len(encode.called) == 4 and sum(map(len, rows.values())) <= 14
    rows.clear()
    # The last tokens are computed again, and only the last picture reaches into them.
    assert [r.ids for r in one.generate([p for p, _ in pairs])] == want
    assert len(encode.called) == 5 and torch.equal(encode.called[-1], model.embed[[5, 6, 7]])
    assert one.generate([asked(27, [5, 6, 8])[0]])[0].cached == 24
    wrong, _ = asked(3, [1, 2])
    wrong = replace(wrong, media=(replace(wrong.media[0], tokens=3),))
    result = one.generate([wrong, pairs[0][0]])
    assert result[0].error == "pictures: 3 tokens, they make 2" and result[1].ids == want[0]
    with pytest.raises(RequestError, match="runs without its vision part"):
        engine().submit(pairs[0][0])


class Rows:
    """Takes embeddings for pictures of themselves, and keeps what it was given."""

    def __init__(self) -> None:
        self.called: list[Tensor] = []

    def __call__(self, items: Several[Any]) -> Tensor:
        self.called += items
        return torch.cat(list(items))

    def check(self, item: Any, tokens: int) -> None:
        if len(item) != tokens:
            raise RequestError(f"{tokens} tokens, they make {len(item)}")

    def largest(self) -> list[Any]:
        return []


def test_a_picture_is_encoded_once_for_all_who_show_it_in_a_step_and_afterwards() -> None:
    model, encode = tiny(), Rows()
    one = Engine.over(Core(model, replace(SMALL, cache_tokens=400), encode))
    media = Media(position=2, tokens=5, digest=b"x", item=model.embed[[1, 2, 3, 4, 5]])
    asked = [Request(prompt=(i, 7, 0, 0, 0, 0, 0, 8), max_tokens=3, media=(media,)) for i in range(4)]
    want = [alone(model, Request(prompt=(i, 7, 1, 2, 3, 4, 5, 8), max_tokens=3), 0) for i in range(4)]
    assert [r.ids for r in one.generate(asked)] == want and len(encode.called) == 1
    assert [r.ids for r in one.generate(asked)] == want and len(encode.called) == 1


def test_the_padded_step_of_a_graph_gives_the_same_rows_and_writes_nothing_else() -> None:
    """With one to three query tokens a sequence, as verification has them."""
    model, r = tiny(), random.Random(8)
    cache = model.cache(800, 4)
    made = Graphs(model, cache, (1, 2, 4, 8, 12), 3, 40)
    for n in made.counts * 3:
        work, left = [], r.randint(1, n)
        while left:
            sequence, count = Sequence(), min(left, r.randint(1, 3))
            length = r.randint(0, 50)
            cache.grow(sequence, length)
            sequence.length = length
            work.append((sequence, [r.randrange(128) for _ in range(count)]))
            left -= count
        cache.rows[:, 4:].normal_()
        tokens = sum(len(ids) for _, ids in work)
        step = batch(cache, work, last=list(range(tokens)), padding=n - tokens)
        assert made.fill(step) == n
        plain = [(Sequence(s.pages, s.length - len(ids)), ids) for s, ids in work]
        before = cache.rows.clone()
        found = model.forward(made.batch(n), cache)[:tokens]
        after = cache.rows.clone()
        cache.rows.copy_(before)
        want = model.forward(batch(cache, plain, last=list(range(tokens))), cache)
        assert (found - want).abs().max() < 1e-9 and torch.allclose(cache.rows, after)
        assert not cache.rows[:, :4].any()
        for sequence, _ in work:
            cache.pool.release(sequence)


def test_a_long_prompt_delays_nobody() -> None:
    """A short request beside a long one has its first token within two steps of its own size."""
    one = engine(replace(SMALL, cache_tokens=4000, step_tokens=64, share=16))
    one.submit(Request(prompt=tuple(i % 128 for i in range(2000)), max_tokens=1))
    one.step()
    short = one.submit(Request(prompt=(1, 2, 3), max_tokens=2))
    heard = [event.id for _ in range(3) for event in one.step()]
    assert short in heard
