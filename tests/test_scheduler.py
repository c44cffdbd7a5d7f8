"""The scheduler's rules, by lengths alone: a made-up device that takes any token."""

import random

import pytest

from runtime_min.pages import Pool
from runtime_min.request import Limits, Media, Request, RequestError
from runtime_min.scheduler import Active, Scheduler


class Device:
    """Runs plans: every computed request samples token 1; tokens are read one step late, as in the engine."""

    def __init__(self, limits: Limits, pages: int) -> None:
        self.pool = Pool(pages, limits.page_tokens)
        self.scheduler, self.limits = Scheduler(self.pool, limits), limits
        self.flight: list[tuple[Active, int, bool]] = []
        self.all: list[Active] = []
        self.steps = 0

    def add(self, prompt: int, tokens: int) -> Active:
        request = Request(prompt=tuple(range(prompt)), max_tokens=tokens)
        a = Active(len(self.all), request, 0, list(request.prompt))
        self.all.append(a)
        self.scheduler.add(a)
        return a

    def step(self) -> dict[int, int]:
        """Tokens of each request in the step, after checking the plan and reading the step before."""
        plan = self.scheduler.plan()
        assert sum(n for _, n in plan) <= self.limits.step_tokens and len(plan) <= self.limits.running
        assert plan or self.flight, "neither launched nor read"
        flight, self.flight = self.flight, []
        for a, n in plan:
            assert 0 < n <= a.todo and a.slot is not None and not a.done
            assert len(a.sequence.pages) * self.pool.page_tokens >= a.sequence.length + n
            sampled = n == a.todo
            a.sequence.length += n
            a.pending += sampled
            self.flight.append((a, a.sequence.length, sampled))
        slots = [a.slot for a, _ in plan]
        assert len(set(slots)) == len(slots)
        for a, length, sampled in flight:
            if a.done:
                continue
            a.pending -= sampled
            self.scheduler.commit(a, length)
            if sampled:
                a.tokens.append(1)
                if len(a.tokens) - len(a.request.prompt) == a.request.max_tokens:
                    self.scheduler.finish(a)
        self.steps += 1
        return {a.id: n for a, n in plan}

    def run(self, most: int = 10_000) -> None:
        while any(not a.done for a in self.all):
            self.step()
            assert self.steps < most


@pytest.mark.parametrize("seed", range(20))
def test_every_step_makes_progress_and_everything_ends(seed: int) -> None:
    """Random limits, random requests, some of which take the whole cache, arriving and leaving at any time."""
    r = random.Random(seed)
    size = r.choice((1, 4, 16))
    pages = r.randint(4, 40)
    running = r.randint(1, 6)
    limits = Limits(running=running, step_tokens=running + r.randint(0, 30), share=r.randint(1, 9), page_tokens=size)
    device = Device(limits, pages)
    for _ in range(60):
        total = r.randint(2, pages * size) if r.random() < 0.3 else r.randint(2, max(2, pages * size // 4))
        prompt = r.randint(1, total - 1)
        device.add(prompt, total - prompt)
        for _ in range(r.randint(0, 6)):
            if any(not a.done for a in device.all):
                device.step()
        alive = [a for a in device.all if not a.done]
        if alive and r.random() < 0.2:
            device.scheduler.finish(r.choice(alive), poisoned=r.random() < 0.5)
    device.run()
    assert device.pool.available == pages and len(device.scheduler.slots) == running
    assert not list(device.scheduler)


def test_decoding_goes_first_and_prompts_share_the_rest() -> None:
    device = Device(Limits(running=4, step_tokens=34, share=4, page_tokens=4), 200)
    device.add(2, 20)
    device.step()
    device.add(100, 1), device.add(200, 1), device.add(9, 1)
    assert device.step() == {0: 1, 1: 11, 2: 11, 3: 9}
    assert device.step() == {0: 1, 1: 16, 2: 17}


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    device = Device(Limits(running=4, step_tokens=64, share=4, page_tokens=4), 10)
    device.add(20, 12), device.add(24, 2), device.add(1, 1)
    while not device.all[0].done:
        assert 2 not in device.step() or device.all[1].slot is not None or device.all[1].done
    device.run()


def test_the_youngest_gives_way_and_comes_back_by_its_prefix() -> None:
    device = Device(Limits(running=2, step_tokens=64, share=4, page_tokens=4), 8)
    old, young = device.add(12, 14), device.add(13, 10)
    device.run()
    assert device.scheduler.preempted >= 1 and old.cached == 0 and young.cached == 0
    assert old.done and young.done and device.pool.available == 8
    third = device.add(13, 1)
    device.run()
    assert third.cached == 12


def test_pictures_are_part_of_a_page_s_content() -> None:
    def key(digest: bytes, position: int) -> list[bytes]:
        media = (Media(position=position, tokens=3, digest=digest, item=None),)
        return Active(0, Request(prompt=(7,) * 8, media=media), 0, [7] * 8).keys_up_to(2, 4)

    a, b, late, across = key(b"a", 0), key(b"b", 0), key(b"a", 4), key(b"a", 2)
    plain = Active(0, Request(prompt=(7,) * 8), 0, [7] * 8).keys_up_to(2, 4)
    assert a[0] != b[0] and a[0] != plain[0] and late[0] == plain[0] and late[1] != plain[1]
    assert len({a[1], b[1], late[1], across[1], plain[1]}) == 5


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(RequestError, match=r"running 65 must be 1..step_tokens"):
        Limits(running=65, step_tokens=64)
