"""The paged latent cache: 576 values a token and layer, in pages that sequences own."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specs.errors import InputError

PAGE_TOKENS = 64


class CacheError(InputError):
    """The cache cannot hold what was asked for."""


def room(lengths: Iterable[int]) -> int:
    """Tokens of a cache that holds sequences of these lengths, each in whole pages."""
    return sum(-(-n // PAGE_TOKENS) * PAGE_TOKENS for n in lengths)


@dataclass(slots=True)
class Sequence:
    """Tokens of one request that are in the cache, and the pages that hold them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class LatentCache:
    """rows: [layers, pages * page_tokens, kv_a]; a row is the normed latent, then the rotated key."""

    def __init__(
        self,
        layers: int,
        tokens: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.page_tokens = page_tokens
        self.pages = -(-tokens // page_tokens)
        self.rows = torch.zeros((layers, self.pages * page_tokens, width), dtype=dtype, device=device)
        self.free = list(range(self.pages - 1, -1, -1))

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Makes room for `tokens` more; CacheError if there are not enough free pages."""
        need = -(-(sequence.length + tokens) // self.page_tokens) - len(sequence.pages)
        if need > len(self.free):
            raise CacheError(
                f"cache: {need} more pages of {self.page_tokens} tokens are needed, {len(self.free)} of {self.pages} "
                "are free"
            )
        sequence.pages += [self.free.pop() for _ in range(need)]

    def slots(self, sequence: Sequence, tokens: int) -> list[int]:
        """Rows that the next `tokens` of a sequence go to."""
        size = self.page_tokens
        return [sequence.pages[p // size] * size + p % size for p in range(sequence.length, sequence.length + tokens)]

    def release(self, sequence: Sequence) -> None:
        self.free += reversed(sequence.pages)
        sequence.pages, sequence.length = [], 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's tokens over all sequences, ragged: sequence b owns tokens cu_q[b]..cu_q[b + 1].

    ids, positions, slots [T] int64; cu_q [B + 1] int32; lengths [B] int32, cached tokens including this step's;
    pages [B, M] int32; last [n] int64, the tokens whose logits are wanted. On the host: longest, the most tokens of a
    sequence, and bounds, cu_q and lengths once more.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    cu_q: Tensor
    lengths: Tensor
    pages: Tensor
    last: Tensor
    longest: int
    bounds: tuple[tuple[int, ...], tuple[int, ...]]


def batch(cache: LatentCache, work: list[tuple[Sequence, list[int]]], every: bool = False) -> Batch:
    """The step that appends each list of ids to its sequence; takes pages and moves the sequences on.

    Logits are wanted for the last token of each sequence, or with `every` for all tokens.
    """
    device = cache.rows.device
    positions: list[int] = []
    slots: list[int] = []
    cu_q = [0]
    for sequence, ids in work:
        cache.grow(sequence, len(ids))
        slots += cache.slots(sequence, len(ids))
        positions += range(sequence.length, sequence.length + len(ids))
        sequence.length += len(ids)
        cu_q.append(cu_q[-1] + len(ids))
    widest = max(len(s.pages) for s, _ in work)
    pages = [s.pages + [0] * (widest - len(s.pages)) for s, _ in work]
    last = list(range(cu_q[-1])) if every else [end - 1 for end in cu_q[1:]]

    def long(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        ids=long([i for _, ids in work for i in ids]),
        positions=long(positions),
        slots=long(slots),
        last=long(last),
        cu_q=torch.tensor(cu_q, dtype=torch.int32, device=device),
        lengths=torch.tensor([s.length for s, _ in work], dtype=torch.int32, device=device),
        pages=torch.tensor(pages, dtype=torch.int32, device=device),
        longest=max(len(ids) for _, ids in work),
        bounds=(tuple(cu_q), tuple(s.length for s, _ in work)),
    )
