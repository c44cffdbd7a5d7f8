"""What callers ask, and what they may ask: requests, limits, and the refusal of what can never run."""

from dataclasses import dataclass, field
from typing import Any

from runtime_min.pages import PAGE_TOKENS
from runtime_min.sample import Sampling
from specs.errors import InputError

# Tokens drafted in a row: with the token before them they still go through decode attention. Nodes of a draft tree:
# with its root as many as an int64 has bits. Children of a node.
MOST_DRAFTS, MOST_BUDGET, WIDTH = 15, 63, 8


class RequestError(InputError):
    """A request that can never run here, or not now; says its numbers and the limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A picture in a prompt: `tokens` embeddings from `position` on, which the ranks make of `item`.

    digest: of the content and of how it was prepared, since the ids at these positions say nothing.
    """

    position: int
    tokens: int
    digest: bytes
    item: Any

    @property
    def end(self) -> int:
        return self.position + self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one caller asks: up to max_tokens ids after `prompt`; an id of `stops` ends it and is given too.

    scored: the log-probability of every prompt token after the first, too (and no help from the prefix cache).
    grammar: a compiled grammar as JSON, which the output keeps to. draft: may the engine's draft propose its tokens?
    """

    prompt: tuple[int, ...]
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stops: frozenset[int] = frozenset()
    scored: bool = False
    media: tuple[Media, ...] = ()
    grammar: str | None = None
    draft: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one group of ranks serves at once.

    running: requests in a step; waiting: further ones before new ones are refused; step_tokens: tokens of all requests
    in a step; share: the least of them that a prompt gets, if there are any; cache_tokens: tokens in the cache, None
    for what `memory` of the card leaves; page_tokens: kernels compiled ahead of time know 64; context: the most tokens
    of a request, None for the model's; graphs: decode steps up to this many tokens are captured, 0 for none; pictures:
    tokens of pictures whose embeddings are kept; grammars: load at the start what requests with grammars need.

    draft: name of the artifact's draft that proposes tokens, None for plain decoding; spec_tokens: how many in a row at
    most, None for what suits its kind; spec_tree: nodes of a tree of them, 0 for a chain; spec_adaptive: fewer or none
    where they do not pay.
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
    pictures: int = 16384
    grammars: bool = False
    draft: str | None = None
    spec_tokens: int | None = None
    spec_tree: int = 0
    spec_adaptive: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.spec_tree <= MOST_BUDGET or not 1 <= (self.spec_tokens or 1) <= MOST_DRAFTS:
            raise RequestError(
                f"limits: {self.spec_tokens} tokens drafted in a row, expected 1..{MOST_DRAFTS}; a tree of "
                f"{self.spec_tree} nodes, expected 0..{MOST_BUDGET}"
            )
        if not 0 < self.running <= self.step_tokens or min(self.share, self.waiting) < 1 or not 0 < self.memory <= 1:
            raise RequestError(
                f"limits: running {self.running} must be 1..step_tokens ({self.step_tokens}), share {self.share} and "
                f"waiting {self.waiting} at least 1, memory {self.memory} in (0, 1]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What any single request must keep to. sees: are pictures understood?"""

    vocab: int
    context: int
    cache_tokens: int
    sees: bool = False

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
        if r.media and not self.sees:
            problems.append(f"media: {len(r.media)} pictures, but this engine runs without its vision part")
        if any(not 0 <= m.position < m.end <= len(r.prompt) for m in r.media):
            problems.append(f"media: reaches beyond the prompt of {len(r.prompt)} tokens")
        said = f"prompt of {len(r.prompt)} and {r.max_tokens} new tokens exceed the"
        if total > self.context:
            problems.append(f"{said} context of {self.context}")
        if total > self.cache_tokens:
            problems.append(f"{said} {self.cache_tokens} tokens of the whole cache")
        if problems:
            raise RequestError(problems)
