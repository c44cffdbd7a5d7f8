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

from runtime_min.pages import Pool, Sequence, page_key
from runtime_min.request import Limits, Request
from runtime_min.speculate.pace import DRAFTED, Own, Pace

# Rows of logits that prompt log-probabilities may take in one step.
SCORED = 256


@dataclass(slots=True, eq=False)
class Active:
    """A request under way. tokens: prompt and output as far as the host has read them; pending: sampled on the device
    and not read yet; committed: its first pages that are in the prefix cache; cached: prompt tokens that came from
    there at first; scored: prompt tokens after the first whose log-probability was reported; counted: its slot holds
    the counts that penalties need; constraint: its place in its grammar.

    drafting: may a draft propose its tokens; extended: cached tokens that the draft has taken in; fed: the step before
    has left what the draft needs of those after them.
    """

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
    constraint: Any = None
    drafting: bool = False
    extended: int = 0
    fed: bool = False
    pace: Own = field(default_factory=Own)

    @property
    def length(self) -> int:
        """Tokens that exist, read or not."""
        return len(self.tokens) + self.pending

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 when all that was asked for is sampled, or while a
        grammar waits for the token before."""
        finished = self.length - len(self.request.prompt) >= self.request.max_tokens
        waits = self.constraint is not None and self.pending
        return 0 if finished or waits else self.length - self.sequence.length

    @property
    def left(self) -> int:
        """Tokens that may still follow those that exist."""
        return len(self.request.prompt) + self.request.max_tokens - self.length

    def keys_up_to(self, pages: int, page_tokens: int, ahead: int = 0) -> list[bytes]:
        """Keys of the first `pages` pages, whose tokens and `ahead` after each must all be known."""
        for i in range(len(self.keys), pages):
            low, high = i * page_tokens, (i + 1) * page_tokens + ahead
            media = [(m.position - low, m.digest) for m in self.request.media if m.position < high and low < m.end]
            self.keys.append(page_key(self.keys[-1] if i else b"", self.tokens[low:high], media))
        return self.keys[:pages]


class Scheduler:
    """The requests of one group of ranks."""

    def __init__(self, pool: Pool, limits: Limits, pace: Pace | None = None) -> None:
        """pace: how much drafts propose, None where there is no draft."""
        self.pool, self.limits, self.pace = pool, limits, pace
        self.ahead = 0 if pace is None else pace.ahead
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
        self._draft(work)
        left = self.limits.step_tokens - sum(work.values())
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

    def _draft(self, work: dict[Active, int]) -> None:
        """Adds drafted tokens to decoding requests while this step's tokens and free pages last."""
        able = [a for a in work if a.drafting and a.fed]
        if self.pace is None or not able:
            return
        room = min(self.limits.step_tokens, DRAFTED) - len(work)
        for i, a in enumerate(able):
            # The last token that a request may have needs no draft.
            wish = self.pace.count(a.pace, a.left - 1, len(work))
            count = min(wish, room // (len(able) - i), self._fits(a) - 1)
            a.drafting = not self.pace.gives_up(a.pace)
            if count > 0:
                self.pool.grow(a.sequence, 1 + count)
                work[a] += count
                room -= count

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
            pages = self.pool.match(a.keys_up_to(whole, size, self.ahead))
            if self.running and self.pool.count(len(a.tokens) + 1) - len(pages) > self.pool.available:
                self.pool.release(Sequence(pages))
                return
            a.sequence = Sequence(pages, len(pages) * size)
            a.committed, a.extended = len(pages), a.sequence.length
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
        a.slot, a.committed, a.counted, a.fed = None, 0, False, False

    def commit(self, a: Active, length: int) -> None:
        """The first `length` tokens of a running request are final, and so are the pages that they fill, if a draft has
        taken them in too."""
        final = length if self.pace is None else min(length, a.extended)
        full = min(final, a.sequence.length) // self.pool.page_tokens
        for page, key in zip(
            a.sequence.pages[a.committed : full],
            a.keys_up_to(full, self.pool.page_tokens, self.ahead)[a.committed :],
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
