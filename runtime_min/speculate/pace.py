"""How much to draft. The rule looks at measured acceptance and at the number of decoding requests, at nothing else:

A request's acceptance a is the share of judged tokens (of a run, up to the first miss) that were accepted, older ones
counting less, beginning at the engine's. A step that drafts k tokens in a row then gives 1 + a + ... + a^k tokens. With
n requests it costs (n0 + n (1 + k)) / (n0 + n) + d (1 + k) plain steps: weights are read for the price of n0 tokens,
and a draft's pass takes d of a step. Drafted is the k that gives most for its cost, none if plain decoding gives as
much. A tree of b nodes goes as deep, and its a falls by a twentieth with each halving of b; the same comparison
chooses b.

A request for which it was none PATIENCE times in a row drafts no more, which costs nothing from then on. New requests
draft if the engine's acceptance pays, and one in PROBES in any case.
"""

from dataclasses import dataclass, field

from runtime_min.request import WIDTH

# From the decode table of an H200 at TP 8: 5.5 ms for one token, 29.3 for 64; a layer and a head of 61 layers.
FREE, PASS = 13.5, 0.05
HALVED = 0.95
# Tokens of a step that may belong to requests with drafts.
DRAFTED = 512
KEPT, KEPT_BY_ALL, PRIOR = 0.9, 0.98, 2.0
PATIENCE, PROBES = 4, 16


@dataclass(slots=True)
class Own:
    """One request's judged tokens, and how often in a row it was not worth drafting."""

    good: float = 0.0
    tried: float = 0.0
    none: int = 0


@dataclass(slots=True, kw_only=True)
class Pace:
    """Of one engine, the same on all its ranks. tokens: most in a row; nodes: of a tree at most, 0 for chains; ahead:
    of the draft."""

    tokens: int
    nodes: int
    ahead: int
    adaptive: bool
    every: Own = field(default_factory=lambda: Own(good=3.0, tried=4.0))
    begun: int = 0

    @property
    def most(self) -> int:
        """Tokens that one request may have drafted."""
        return self.nodes or self.tokens

    def rows(self, requests: int) -> int:
        """Tokens of the largest step in which so many requests verify."""
        return max(requests, min(DRAFTED, requests * (1 + self.most)))

    def begins(self) -> bool:
        """Does a new request draft?"""
        self.begun += 1
        return not self.adaptive or self.begun % PROBES == 1 or self._best(self._acceptance(Own()), self.tokens, 1) > 0

    def count(self, own: Own, room: int, requests: int) -> int:
        """Tokens to draft for a request that may have `room` of them, in a step with so many requests."""
        depth = min(self.tokens, room)
        if depth <= 0:
            return 0
        count = self._best(self._acceptance(own), depth, requests) if self.adaptive else self._most(depth)
        own.none = 0 if count else own.none + 1
        return count

    def gives_up(self, own: Own) -> bool:
        return own.none >= PATIENCE

    def heard(self, own: Own, accepted: int, depth: int) -> None:
        """Takes in a run of `accepted` tokens that could have been `depth` long."""
        tried = accepted + (accepted < depth)
        for sums, kept in ((own, KEPT), (self.every, KEPT_BY_ALL)):
            sums.good = kept * sums.good + accepted
            sums.tried = kept * sums.tried + tried

    def _most(self, depth: int) -> int:
        if not self.nodes:
            return depth
        # The root alone has children in a tree of one level.
        return min(self.nodes, WIDTH) if depth == 1 else self.nodes

    def _acceptance(self, own: Own) -> float:
        prior = self.every.good / self.every.tried
        return (own.good + PRIOR * prior) / (own.tried + PRIOR)

    def _best(self, a: float, depth: int, requests: int) -> int:
        """The rule."""

        def worth(tokens: int, in_a_row: int, a: float) -> float:
            cost = (FREE + requests * (1 + tokens)) / (FREE + requests) + PASS * (1 + in_a_row)
            return sum(a**i for i in range(in_a_row + 1)) / cost

        if self.nodes:
            most = self._most(depth)
            found = {most >> h: worth(most >> h, min(depth, most >> h), a * HALVED**h) for h in range(7) if most >> h}
        else:
            found = {k: worth(k, k, a) for k in range(1, depth + 1)}
        best = max(found, key=lambda k: (found[k], -k))
        return best if found[best] > 1 else 0
