"""Who runs next: pure host logic over requests and pages. It knows lengths, never tensors.

Rules. Requests go in order of arrival. Decoding requests run in every step, and for want of a page the youngest
running request gives up its own (it is computed again later, mostly from the prefix cache). What a step has left goes
to prompts, in equal shares, so that a short prompt need not wait for a long one. A waiting request is admitted when
its whole text fits; nobody overtakes. The oldest can always go on, so every step has work while there are requests.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime_min.pages import PAGE_TOKENS, Pool, Sequence, page_key
from runtime_min.sample import Sampling
from specs.errors import InputError

# Rows of logits that prompt log-probabilities may take in one step.
SCORED = 256


class RequestError(InputError):
    """A request that can never run here, or not now; says its numbers and the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """Embeddings in place of token rows: features [n, hidden] for positions `position`.. of the prompt. digest: of the
    content and how it was prepared, since the ids at these positions say nothing."""

    position: int
    digest: bytes
    features: Any

    @property
    def end(self) -> int:
        return self.position + len(self.features)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one caller asks: up to max_tokens ids after `prompt`; an id of `stops` ends it and is given too.

    scored: the log-probability of every prompt token after the first, too (and no help from the prefix cache).
    """

    prompt: tuple[int, ...]
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stops: frozenset[int] = frozenset()
    scored: bool = False
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one group of ranks serves at once.

    running: requests in a step; waiting: further ones before new ones are refused; step_tokens: tokens of all requests
    in a step; share: the least of them that a prompt gets, if there are any; cache_tokens: tokens in the cache, None
    for what `memory` of the card leaves; page_tokens: kernels compiled ahead of time know 64; context: the most tokens
    of a request, None for the model's; graphs: decode steps up to this many tokens are captured, 0 for none.
    """

    running: int = 64
    waiting: int = 1024
    step_tokens: int = 2048
    share: int = 256
    cache_tokens: int | None = None
    page_tokens: int = PAGE_TOKENS
    context: int | None = None
    memory: float = 0.92
    graphs: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.running <= self.step_tokens or min(self.share, self.waiting) < 1 or not 0 < self.memory <= 1:
            raise RequestError(
                f"limits: running {self.running} must be 1..step_tokens ({self.step_tokens}), share {self.share} and "
                f"waiting {self.waiting} at least 1, memory {self.memory} in (0, 1]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What any single request must keep to."""

    vocab: int
    context: int
    cache_tokens: int

    def check(self, r: Request) -> None:
        """RequestError with every reason why this request can never run."""
        total, problems = len(r.prompt) + r.max_tokens, []
        if not r.prompt:
            problems.append("prompt: is empty, expected at least one token")
        if r.max_tokens < 1:
            problems.append(f"max_tokens: found {r.max_tokens}, expected at least 1")
        for name, ids in (("prompt", r.prompt), ("bias", [i for i, _ in r.sampling.bias])):
            bad = [i for i in ids if not 0 <= i < self.vocab]
            if bad:
                problems.append(f"{name}: id {bad[0]} is outside the vocabulary 0..{self.vocab - 1}")
        said = f"prompt of {len(r.prompt)} and {r.max_tokens} new tokens exceed the"
        if total > self.context:
            problems.append(f"{said} context of {self.context}")
        if total > self.cache_tokens:
            problems.append(f"{said} {self.cache_tokens} tokens of the whole cache")
        if problems:
            raise RequestError(problems)


@dataclass(slots=True, eq=False)
class Active:
    """A request under way. tokens: prompt and output as far as the host has read them; pending: sampled on the device
    and not read yet; committed: its first pages that are in the prefix cache; cached: prompt tokens that came from
    there at first; scored: prompt tokens after the first whose log-probability was reported; counted:
    its slot holds the counts that penalties need."""

    id: int
    request: Request
    seed: int
    tokens: list[int]
    pending: int = 0
    sequence: Sequence = field(default_factory=Sequence)
    keys: list[bytes] = field(default_factory=list)
    committed: int = 0
    slot: int | None = None
    cached: int | None = None
    scored: int = 0
    counted: bool = False
    done: bool = False

    @property
    def length(self) -> int:
        """Tokens that exist, read or not."""
        return len(self.tokens) + self.pending

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 when all that was asked for is sampled."""
        finished = self.length - len(self.request.prompt) >= self.request.max_tokens
        return 0 if finished else self.length - self.sequence.length

    def keys_up_to(self, pages: int, page_tokens: int) -> list[bytes]:
        """Keys of the first `pages` pages, whose tokens must all be known."""
        for i in range(len(self.keys), pages):
            low, high = i * page_tokens, (i + 1) * page_tokens
            media = [(m.position - low, m.digest) for m in self.request.media if m.position < high and low < m.end]
            self.keys.append(page_key(self.keys[-1] if i else b"", self.tokens[low:high], media))
        return self.keys[:pages]


class Scheduler:
    """The requests of one group of ranks."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        self.pool, self.limits = pool, limits
        self.waiting: list[Active] = []
        self.running: list[Active] = []
        self.slots = list(range(limits.running - 1, -1, -1))
        self.preempted = 0

    def __iter__(self) -> Iterator[Active]:
        yield from self.running
        yield from self.waiting

    def add(self, active: Active) -> None:
        insort(self.waiting, active, key=_order)

    def plan(self) -> list[tuple[Active, int]]:
        """The next step: (request, tokens of it to compute), decoding ones first; pages are taken."""
        before = self.preempted
        work: dict[Active, int] = {}
        for a in [a for a in self.running if a.todo == 1]:
            if a.slot is not None and self._room(a):
                work[a] = 1
        # Whoever lost its pages to an older one is not in the step any more.
        work = {a: n for a, n in work.items() if a.slot is not None}
        left = self.limits.step_tokens - len(work)
        if self.preempted == before:
            self._admit(left)
        prompts = [a for a in self.running if a.todo and a not in work]
        while prompts and not work and self._fits(prompts[0]) < 1:
            self._preempt(self.running[-1])
            prompts = [a for a in prompts if a.slot is not None]
        for i, a in enumerate(prompts):
            share = max(self.limits.share, left // (len(prompts) - i))
            most = SCORED if a.request.scored else share
            count = min(a.todo, share, most, left, self._fits(a))
            if count > 0:
                self.pool.grow(a.sequence, count)
                work[a] = count
                left -= count
        return list(work.items())

    def _fits(self, a: Active) -> int:
        """Tokens that can follow without taking a page from anybody."""
        pages = len(a.sequence.pages) + self.pool.available
        return pages * self.pool.page_tokens - a.sequence.length

    def _room(self, a: Active) -> bool:
        """Takes a page for one more token if one is needed; False if `a` itself was the youngest and had to give up."""
        while self._fits(a) < 1:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is a:
                return False
        self.pool.grow(a.sequence, 1)
        return True

    def _admit(self, left: int) -> None:
        """Moves waiting requests to running while slots, pages and this step's tokens last."""
        prompts = sum(a.todo > 1 for a in self.running)
        while self.waiting and self.slots and left > prompts * self.limits.share:
            a = self.waiting[0]
            # A token of it is still on its way to the host.
            if a.pending:
                return
            size = self.pool.page_tokens
            whole = 0 if a.request.scored else (len(a.tokens) - 1) // size
            pages = self.pool.match(a.keys_up_to(whole, size))
            if self.running and self.pool.count(len(a.tokens) + 1) - len(pages) > self.pool.available:
                self.pool.release(Sequence(pages))
                return
            a.sequence = Sequence(pages, len(pages) * size)
            a.committed = len(pages)
            a.cached = a.sequence.length if a.cached is None else a.cached
            a.slot = self.slots.pop()
            insort(self.running, self.waiting.pop(0), key=_order)
            prompts += 1

    def _preempt(self, a: Active) -> None:
        self._leave(a)
        self.preempted += 1
        self.add(a)

    def _leave(self, a: Active) -> None:
        self.running.remove(a)
        self.pool.release(a.sequence)
        if a.slot is not None:
            self.slots.append(a.slot)
        a.slot, a.committed, a.counted = None, 0, False

    def commit(self, a: Active, length: int) -> None:
        """The first `length` tokens of a running request are final, and so are the pages that they fill."""
        full = min(length, a.sequence.length) // self.pool.page_tokens
        for page, key in zip(
            a.sequence.pages[a.committed : full],
            a.keys_up_to(full, self.pool.page_tokens)[a.committed :],
            strict=True,
        ):
            self.pool.commit(page, key)
        a.committed = max(a.committed, full)

    def finish(self, a: Active, poisoned: bool = False) -> None:
        """Ends a request. If it was `poisoned`, none of its pages is found by prefix again."""
        a.done = True
        if poisoned:
            self.pool.forget(a.keys)
        if a.slot is not None:
            self._leave(a)
        else:
            self.waiting.remove(a)


def _order(a: Active) -> int:
    return a.id
