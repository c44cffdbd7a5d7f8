"""The one protocol of drafts: they are fed the target's states of tokens that stand, and propose what may follow.

Chains, blocks and trees are all nodes with parents: token 0 is the root, the newest token, which stands but has no
states yet; node i > 0 is drafted. In a chain the parent of node i is i - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runtime_min.kv import Batch, LatentCache
from runtime_min.sampler import Guess
from runtime_min.scheduler import Active


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """Tokens of requests that stand, one request's after another. states [T, taps * hidden] of the target; embeds
    [T, hidden] of the tokens after them, if the draft looks ahead; batch: their places, with `last` the last token of
    each request."""

    actives: Sequence[Active]
    states: Tensor | None
    embeds: Tensor | None
    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that wants `count` tokens, none deeper than `depth`; all its tokens stand, the newest without states.
    place: of it in what was fed in this step."""

    active: Active
    count: int
    depth: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """tokens [sum of counts] int64, one request's after another. parents: of root and nodes, for each request. scores:
    of the i-th tokens of all chains that have one, the logits [n, vocab] they were drawn from; none where a draft
    says for certain what it proposes."""

    tokens: Tensor
    parents: list[list[int]]
    scores: list[Tensor]


class Draft(Protocol):
    """taps: layers whose outputs it is fed; ahead: tokens after a position that its cached entry depends on; longest:
    the longest run it can propose; usual: what suits it; cached: bytes of
    a token in its own cache."""

    taps: tuple[int, ...]
    ahead: int
    longest: int
    usual: int
    cached: int

    def bind(self, cache: LatentCache) -> None:
        """Gets room of its own in the pages of the target's cache."""

    def warm(self, step_tokens: int) -> None:
        """Compiles what steps of up to so many tokens launch, where kernels are compiled at their first use."""

    def extend(self, fed: Fed) -> None:
        """Takes in tokens that stand."""

    def propose(self, asked: Sequence[Asked], guess: Guess) -> Proposal:
        """Exactly as many tokens as asked for. `guess` draws them as the requests want."""

    def grow(self, asked: Sequence[Asked]) -> Proposal:
        """The same as trees, whose nodes no request's random numbers decide."""


def chain(count: int) -> list[int]:
    """Parents of a root and `count` nodes in a row."""
    return list(range(-1, count))
