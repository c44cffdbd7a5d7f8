"""Verification. The target chooses a token behind every node of what was drafted; the longest path of nodes that bear
the tokens it chose is accepted, and its last choice comes on top. Everything follows from how it chooses.

Greedy: the likeliest token, so the path is what plain decoding gives. A tree, whose nodes are certain once the draft's
distributions are known: a token drawn from the target's own distribution, by the same random numbers as in plain
decoding. Every token is then such a draw, whatever was drafted, since nothing in a draw depends on the nodes.

A chain of tokens that were themselves drawn, y from q: `judged`. Behind any text the token that comes out is y with
probability q(y) min(1, p(y) / q(y)) = min(p(y), q(y)); what is missing of p, max(p - q, 0), has exactly the mass with
which y is refused, and a refused y is replaced by a draw from it. So the token is distributed by p. It never equals a
refused y, where p < q and nothing is left, so paths tell acceptance. Numbers that accept, replace and draft come from
streams of their own; those of a position decide only in the step that settles it, so they may be met again before.
Source: Leviathan et al. 2023, Chen et al. 2023.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from runtime_min.sample import ACCEPT, RESIDUAL, uniform


def judged(p: Tensor, q: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The target's choices [n]: drafts [n] where they are accepted, else tokens from what is left of p.

    p, q [n, V] float64: distributions of target and draft. seeds, positions [n].
    """
    py, qy = (d.gather(1, drafts[:, None])[:, 0] for d in (p, q))
    accepted = uniform(seeds, positions, 1, ACCEPT)[:, 0] * qy < py
    left = (p - q).clamp(min=0)
    # p and q are the same but for rounding where nothing is left; then nothing is refused either.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, p)
    noise = -(-uniform(seeds, positions, p.shape[1], RESIDUAL).log()).log()
    return torch.where(accepted, drafts, (left.log() + noise).argmax(-1))


def walk(chosen: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The accepted path: nodes from the root (0) on. chosen: behind each node; tokens: that they bear; parents: of
    each, -1 of the root. Siblings bear different tokens."""
    children = {(parent, token): i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    while (child := children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(child)
    return path


def until(stops: Collection[int], tokens: Iterable[int]) -> list[int]:
    """The tokens up to the first stop, and that one."""
    out: list[int] = []
    for token in tokens:
        out.append(token)
        if token in stops:
            break
    return out
