"""Embeddings of pictures: made when a step first reaches them, kept while they are among the last that steps used.

What comes from the prefix cache is never encoded, and requests that show the same picture share its rows.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from runtime_min.kv import upload
from runtime_min.request import Media

# Pictures of a prompt, and the first and the last but one of the positions that a step takes of it.
Span = tuple[Sequence[Media], int, int]


class Encode(Protocol):
    """From the items of media to rows of embeddings. Every rank calls it with the same items."""

    def __call__(self, items: Sequence[Any]) -> Tensor:
        """Embeddings [tokens of all items, hidden], one item below the other."""

    def check(self, item: Any, tokens: int) -> None:
        """InputError for an item that it cannot take, or that makes another number of tokens."""

    def largest(self) -> Sequence[Any]:
        """Items that take as much memory at once as any."""


class Embeddings:
    """rows: [tokens, hidden] of each picture by its digest, the last used one last. The same on every rank."""

    def __init__(self, encode: Encode, tokens: int) -> None:
        """tokens: rows to keep, unless a single step needs more."""
        self.encode, self.tokens = encode, tokens
        self.rows: OrderedDict[bytes, Tensor] = OrderedDict()

    def need(self, media: Iterable[Media]) -> None:
        """Makes the rows of all of these be there."""
        wanted = {m.digest: m for m in media}
        missing = [m for digest, m in wanted.items() if digest not in self.rows]
        if missing:
            whole = self.encode([m.item for m in missing])
            parts = whole.split([m.tokens for m in missing])  # type: ignore[no-untyped-call]
            # Copies, so that one can go without the others.
            self.rows |= {m.digest: part.clone() for m, part in zip(missing, parts, strict=True)}
        for digest in wanted:
            self.rows.move_to_end(digest)
        while len(self.rows) > len(wanted) and sum(map(len, self.rows.values())) > self.tokens:
            self.rows.popitem(last=False)

    def placed(self, groups: Sequence[Sequence[Span]], own: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Which of the tokens of the spans of group `own`, one span after another, are pictures', and their embeddings;
        all ranks make those of all groups together."""
        self.need(m for spans in groups for media, start, end in spans for m, _, _ in seen(media, start, end))
        places, features, at = [], [], 0
        for media, start, end in groups[own]:
            for m, low, high in seen(media, start, end):
                places.append(np.arange(low, high) - start + at)
                features.append(self.rows[m.digest][low - m.position : high - m.position])
            at += end - start
        return (upload(np.concatenate(places), device), torch.cat(features)) if places else None


def seen(media: Iterable[Media], start: int, end: int) -> list[tuple[Media, int, int]]:
    """(picture, first, last position) of every picture that reaches into start..end, cut to it."""
    found = ((m, max(start, m.position), min(end, m.end)) for m in media)
    return [(m, low, high) for m, low, high in found if low < high]
