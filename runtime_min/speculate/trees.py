"""Which nodes a draft tree has: those that the draft holds for the likeliest, best first, until the budget is spent.

A node's worth is the product of the draft's probabilities on its path, so no node is worth more than its parent, and
the best ones always hang together. The draft's distributions decide, no random number does.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from runtime_min.ranks import Ranks
from runtime_min.request import WIDTH

# The logarithm of a token's probability that the draft gives none.
LEAST = -1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """One level of nodes of n trees. worth [n, m] float64, logarithms; ids [n, m] tokens; above [n, m]: the parent
    among the level before; beam [n, m]: the parent among those that were expanded."""

    worth: Tensor
    ids: Tensor
    above: Tensor
    beam: Tensor

    @classmethod
    def of(cls, logits: Tensor, parents: "tuple[Candidates, Tensor] | None") -> Self:
        """The likeliest children of expanded nodes: logits [n, expanded, vocab]; parents: the level before, and which
        of it was expanded [n, expanded]; None for the root."""
        top = logits.double().nan_to_num(neginf=-torch.inf).log_softmax(-1).topk(min(WIDTH, logits.shape[-1]))
        beam = torch.arange(logits.shape[1], device=logits.device)[:, None].expand_as(top.indices)
        worth, above = top.values.clamp(min=LEAST), torch.zeros_like(top.indices)
        if parents is not None:
            level, places = parents
            worth = worth + level.worth.gather(1, places)[..., None]
            above = places[..., None].expand_as(top.indices)
        flat = (t.flatten(1) for t in (worth, top.indices, above, beam))
        return cls(**dict(zip(("worth", "ids", "above", "beam"), flat, strict=True)))

    def best(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each tree's up to `count` best nodes of this level the tokens, the parents among those that were expanded,
        and the places [n, count]."""
        places = self.worth.topk(min(count, self.worth.shape[1]), -1).indices
        return self.ids.gather(1, places), self.beam.gather(1, places), places


def likeliest(levels: Sequence[Candidates], count: int, ranks: Ranks) -> list[tuple[list[int], list[int]]]:
    """Tokens of the `count` best nodes, and the parents of root and nodes, for each tree; as ranks agree."""
    told = ranks.agreed(
        torch.cat([torch.stack([level.worth, level.ids.double(), level.above.double()]) for level in levels], -1)
    )
    sizes = [level.ids.shape[1] for level in levels]
    return [_chosen(worth, ids, above, sizes, count) for worth, ids, above in told.transpose(0, 1).tolist()]


def _chosen(
    worth: list[float], ids: list[float], above: list[float], sizes: Sequence[int], count: int
) -> tuple[list[int], list[int]]:
    # Of equals the first, which is never a child of the others.
    kept = sorted(sorted(range(len(worth)), key=lambda i: -worth[i])[:count])
    number = {place: i for i, place in enumerate(kept, start=1)}
    parents = [-1]
    for place in kept:
        start, level = 0, 0
        while place >= start + sizes[level]:
            start, level = start + sizes[level], level + 1
        parents.append(0 if level == 0 else number[start - sizes[level - 1] + int(above[place])])
    return [int(ids[place]) for place in kept], parents


def best_first(
    worth: Sequence[Sequence[float]], ids: Sequence[Sequence[float]], count: int
) -> tuple[list[int], list[int]]:
    """The same for a tree whose levels do not depend on each other: worth, ids [depth][width], the likeliest first."""
    tokens: list[int] = []
    parents = [-1]
    # Minus the worth, the parent, depth and rank among its siblings.
    heap = [(-worth[0][0], 0, 0, 0)]
    while heap and len(tokens) < count:
        cost, parent, depth, rank = heapq.heappop(heap)
        tokens.append(int(ids[depth][rank]))
        parents.append(parent)
        if rank + 1 < len(ids[depth]):
            heapq.heappush(heap, (cost + worth[depth][rank] - worth[depth][rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(ids):
            heapq.heappush(heap, (cost - worth[depth + 1][0], len(tokens), depth + 1, 0))
    return tokens, parents
