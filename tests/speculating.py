"""Drafts without weights, of every quality, behind the engine's one protocol."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from runtime_min.artifact import Stored
from runtime_min.core import Core
from runtime_min.drafts.open import made
from runtime_min.engine import Engine
from runtime_min.kv import LatentCache
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_dims
from runtime_min.models.shapes import random as random_weights
from runtime_min.ranks import Ranks
from runtime_min.request import Limits
from runtime_min.sampler import Guess, Row
from runtime_min.speculate.draft import Asked, Draft, Fed, Proposal, chain
from runtime_min.speculate.models import draft_of
from specs.draft import read_draft_config
from specs.mesh import Mesh
from tests.draft_statement import DFLASH, LLAMA, MLA, MLA31, randomized
from tests.drafts import stored
from tests.engines import CPU, DIMS, cached_moe, tiny

# From a request's tokens so far and its number to what is proposed, at least as many as asked for.
Script = Callable[[list[int], int, int], list[int]]


class Scripted:
    """Proposes what `script` says. drawn: draws from distributions that are peaked there instead. Checks that it is fed
    all that stands before it is asked, and never asked for more than may follow."""

    taps: tuple[int, ...] = ()
    ahead, longest, usual, cached = 1, 15, 3, 0

    def __init__(self, script: Script, drawn: bool = False, vocab: int = DIMS.vocab) -> None:
        self.script, self.drawn, self.vocab = script, drawn, vocab
        self.fed: dict[int, int] = {}
        self.asked: list[tuple[int, int]] = []

    def bind(self, cache: LatentCache) -> None:
        """Keeps nothing."""

    def warm(self, step_tokens: int) -> None:
        """Launches nothing."""

    def extend(self, fed: Fed) -> None:
        for a in fed.actives:
            self.fed[a.id] = min(a.sequence.length, len(a.tokens) - self.ahead)

    def propose(self, asked: Sequence[Asked], guess: Guess) -> Proposal:
        rows, scores = [self._row(a) for a in asked], []
        grid = torch.tensor([(row + [0] * 15)[:15] for row in rows])
        for level in range(max(a.count for a in asked) if self.drawn else 0):
            here = [i for i, a in enumerate(asked) if a.count > level]
            logits = torch.randn(len(here), self.vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            logits[range(len(here)), grid[here, level]] += 3
            wanted = [
                Row(
                    sampling=asked[i].active.request.sampling, seed=asked[i].active.seed, slot=asked[i].active.slot,
                    position=len(asked[i].active.tokens) + level, behind=tuple(range(15 * i, 15 * i + level)),
                )
                for i in here
            ]  # fmt: skip
            grid[here, level], score = guess(logits, wanted, grid.flatten())
            scores.append(score)
        tokens = torch.cat([grid[i, : a.count] for i, a in enumerate(asked)])
        return Proposal(tokens=tokens, parents=[chain(a.count) for a in asked], scores=scores)

    def grow(self, asked: Sequence[Asked]) -> Proposal:
        """The script's run, with wrong siblings in front of and behind each of its tokens."""
        tokens: list[int] = []
        parents = []
        for a in asked:
            run, spine, here = self._row(a), 0, [-1]
            for token in run[: a.depth]:
                right = 0
                for t in (token + 1, token, token + 2):
                    if len(here) <= a.count:
                        here.append(spine)
                        tokens.append(t % self.vocab)
                        right = len(here) - 1 if t == token else right
                spine = right
            while len(here) <= a.count:
                # What is left of the budget hangs under the root.
                here.append(0)
                tokens.append((run[0] + 10 + len(here)) % self.vocab)
            parents.append(here)
        return Proposal(tokens=torch.tensor(tokens), parents=parents, scores=[])

    def _row(self, asked: Asked) -> list[int]:
        a = asked.active
        assert self.fed[a.id] == a.sequence.length == len(a.tokens) - 1 and asked.count > 0
        assert len(a.tokens) + 1 <= len(a.request.prompt) + a.request.max_tokens
        self.asked.append((a.id, asked.count))
        return self.script(list(a.tokens), a.id, asked.count)


def answers(want: Sequence[Sequence[int]], quality: float, seed: int = 0) -> Script:
    """Knows the whole texts (prompts and answers) and says each token of them with this probability."""
    r = random.Random(seed)

    def script(tokens: list[int], id: int, count: int) -> list[int]:
        text = list(want[id % len(want)])
        rest = [*text[len(tokens) :], *[0] * count][:count]
        return [t if r.random() < quality else r.randrange(DIMS.vocab) for t in rest]

    return script


def speculating(draft: Draft, limits: Limits, model: Decoder | None = None) -> Engine:
    return Engine.over(Core(model or tiny(), limits, draft=draft))


KINDS = {"eagle3 llama": LLAMA, "eagle3 mla": MLA, "eagle3.1": MLA31, "dflash": DFLASH}


@cache
def target() -> Decoder:
    """A target of layers enough to tap."""
    torch.manual_seed(6)
    dims = replace(DIMS, layers=3)
    weights = of_dims(dims, Mesh(), random_weights(CPU), torch.float64)
    weights["head"].tensor.mul_(6)
    return Decoder(dims, weights, cached_moe(), Ranks(0, Mesh()), Settings(dtype=torch.float64, device=CPU))


def real(kind: str) -> Draft:
    """A draft with weights, random ones."""
    config = KINDS[kind] | {"vocab_size": DIMS.vocab}
    dims = replace(read_draft_config(config, 5), taps=(0, 1, 2))
    w = randomized(config, 3)
    if kind == "dflash":
        w["fc.weight"] = w["fc.weight"][:, : 3 * DIMS.hidden]
    kept = {n: Stored(x.double(), "plain.v1", {}, (tuple(x.shape),)) for n, x in stored(w, config, 1, 0).items()}
    return draft_of(made(dims, kept, target()), target())
