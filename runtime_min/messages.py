"""What goes into an engine and what comes out of it."""

from dataclasses import dataclass
from typing import Literal

from runtime_min.request import Request
from runtime_min.speculate.figures import Acceptance

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """A token, its log-probability, and the likeliest (token, log-probability) pairs at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A checked request under an id that grows from one to the next."""

    id: int
    request: Request
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """The last command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """An engine's state after a step, over all groups: requests, pages of the cache, of them not held by a request;
    preemptions so far; kernels compiled since it was ready, which should be none; what became of drafts, None where
    there is no draft."""

    running: int = 0
    waiting: int = 0
    pages: int = 1
    free: int = 1
    preempted: int = 0
    compiled: int = 0
    drafts: Acceptance | None = None


Command = Submit | Cancel | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """News of one request: tokens, or log-probabilities of its prompt, or its end. cached: prompt tokens that came
    from the prefix cache. drafted: tokens that a draft proposed for this step, accepted: of them those among `tokens`.
    """

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    scored: tuple[Logprob, ...] = ()
    finish: Finish | None = None
    error: str | None = None
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
