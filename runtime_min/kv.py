"""The paged latent cache, 576 values a token and layer, and the tensors of one step over it."""

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime_min.pages import NULL_PAGE, PAGE_TOKENS, Pool, Sequence

# Up to this many query tokens a sequence, attention stays in the latent space; above, it is cheaper to expand keys.
FEW_QUERIES = 16
# Nodes of a draft tree: as many as an int64 has bits.
MOST_NODES = 64
Array = NDArray[Any]


def room(lengths: Iterable[int]) -> int:
    """Tokens of a cache that holds sequences of these lengths, each in whole pages."""
    return sum(-(-n // PAGE_TOKENS) * PAGE_TOKENS for n in lengths)


class LatentCache:
    """rows: [layers, (1 + pages) * page_tokens, kv_a]; a row is the normed latent, then the rotated key."""

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
        self.pool = Pool(-(-tokens // page_tokens), page_tokens)
        shape = (layers, (1 + self.pool.pages) * page_tokens, width)
        self.rows = torch.zeros(shape, dtype=dtype, device=device)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Makes room for `tokens` more; CacheError if there are not enough pages."""
        self.pool.grow(sequence, tokens)


@dataclass(frozen=True, slots=True)
class DraftCache:
    """A draft's rows [layers, (1 + pages) * page_tokens, width] in the pages of a target's cache, which hands them out:
    what a draft keeps of position p lies where the target keeps its own."""

    rows: Tensor
    page_tokens: int


@dataclass(frozen=True, slots=True)
class Tree:
    """Which keys a part's tokens see where they are the nodes of draft trees, at most MOST_NODES a sequence.

    prefix [B] int32: keys before it are seen by every query of the sequence. visible [T] int64: key prefix + j is seen
    by query t if and only if bit j of visible[t] is set. Every query sees at least one key.
    """

    prefix: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Neighbouring sequences that attention treats alike, tokens first..last of the batch.

    cu_q [B + 1] int32, bounds of the sequences in the part; lengths [B] int32, cached tokens including this step's;
    pages [B, M] int32. On the host: longest, the most tokens of a sequence, and bounds, cu_q and lengths once more.
    tree: None where every token sees all before it and itself.
    """

    first: int
    last: int
    cu_q: Tensor
    lengths: Tensor
    pages: Tensor
    longest: int
    bounds: tuple[tuple[int, ...], tuple[int, ...]]
    tree: Tree | None = None

    @property
    def masks(self) -> tuple[Tensor, Tensor] | None:
        """The tree as ops take it."""
        return None if self.tree is None else (self.tree.prefix, self.tree.visible)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's tokens over all sequences, ragged.

    ids, positions, slots [T] int64, slots negative where nothing is written; last [n] int64, the tokens whose logits
    are wanted. rows: tokens that each group of ranks brings to the experts, at least T.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    last: Tensor
    parts: tuple[Part, ...]
    rows: int


def upload(values: Array, device: torch.device) -> Tensor:
    """A tensor of these values on the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def ancestors(parents: Ids[int]) -> Array:
    """Of every node of a tree the bits of itself and its ancestors, int64; and their number less one, its depth [2, n].

    parents: of every node one before it, -1 of a root.
    """
    out = np.zeros((2, len(parents)), np.int64)
    for i, parent in enumerate(parents):
        own = np.array([1 << i], np.uint64).view(np.int64)[0]
        out[:, i] = (own, 0) if parent < 0 else (out[0, parent] | own, out[1, parent] + 1)
    return out


def batch(
    cache: LatentCache,
    work: list[tuple[Sequence, list[int]]],
    last: list[int] | None = None,
    padding: int = 0,
    rows: int = 0,
    parents: Ids[Ids[int] | None] = (),
) -> Batch:
    """The step that appends each list of ids to its sequence; takes pages and moves the sequences on.

    Logits are wanted for the tokens `last`, by default the last one of each sequence. `padding` more sequences of one
    token follow that write nothing and see only the null page. parents: for each sequence whose tokens are nodes of a
    tree, the parents of its nodes as `ancestors` takes them; their positions go by depth, their slots by order.
    """
    device, size = cache.rows.device, cache.page_tokens
    spans: list[tuple[int, int]] = []
    slots: list[Array] = []
    for sequence, ids in work:
        cache.grow(sequence, len(ids))
        start, end = sequence.length, sequence.length + len(ids)
        at = np.arange(start, end)
        pages = np.array(sequence.pages[start // size : -(-end // size)])
        slots.append(pages[at // size - start // size] * size + at % size)
        spans.append((start, end))
        sequence.length = end
    held = [(s.pages[: cache.pool.count(s.length)], len(ids), s.length) for s, ids in work]
    held += [([NULL_PAGE], 1, 1)] * padding
    trees = [None if p is None else ancestors(p) for p in parents or [None] * len(work)]
    places = [np.arange(*s) if tree is None else s[0] + tree[1] for s, tree in zip(spans, trees, strict=True)]
    # Padding is part of a step that holds nothing but trees.
    trees += [None if not trees or any(t is None for t in trees) else ancestors([-1])] * padding
    idle = np.zeros(padding, np.int64)
    if last is None:
        last = (np.cumsum([len(ids) for _, ids in work]) - 1).tolist() if work else []
    count = sum(n for _, n, _ in held)
    return Batch(
        ids=upload(np.concatenate([np.array([i for _, ids in work for i in ids], np.int64), idle]), device),
        positions=upload(np.concatenate([*places, idle]).astype(np.int64), device),
        slots=upload(np.concatenate([*slots, idle - 1]).astype(np.int64), device),
        last=upload(np.array(last, np.int64), device),
        parts=tuple(_parts(held, trees, device)),
        rows=max(rows, count),
    )


def _parts(held: list[tuple[list[int], int, int]], trees: list[Array | None], device: torch.device) -> list[Part]:
    """held: (pages, query tokens, cached tokens) of every sequence, cut where few query tokens meet many, or nodes of a
    tree others."""
    kinds = [(n > FEW_QUERIES and t is None, t is not None) for (_, n, _), t in zip(held, trees, strict=True)]
    out: list[Part] = []
    token = start = 0
    for i in range(1, len(held) + 1):
        if i < len(held) and kinds[i] == kinds[start]:
            continue
        out.append(_part(token, held[start:i], device))
        if kinds[start][1]:
            out[-1] = replace(out[-1], tree=_tree(held[start:i], trees[start:i], device))
        token, start = out[-1].last, i
    return out


def _part(first: int, mine: list[tuple[list[int], int, int]], device: torch.device) -> Part:
    cu_q = np.cumsum([0, *(n for _, n, _ in mine)])
    lengths = np.array([n for _, _, n in mine])
    table = np.zeros((len(mine), max(len(pages) for pages, _, _ in mine)), np.int32)
    for row, (pages, _, _) in zip(table, mine, strict=True):
        row[: len(pages)] = pages
    return Part(
        first=first,
        last=first + int(cu_q[-1]),
        cu_q=upload(cu_q.astype(np.int32), device),
        lengths=upload(lengths.astype(np.int32), device),
        pages=upload(table, device),
        longest=max(n for _, n, _ in mine),
        bounds=(tuple(cu_q.tolist()), tuple(lengths.tolist())),
    )


def _tree(mine: list[tuple[list[int], int, int]], trees: list[Array | None], device: torch.device) -> Tree:
    prefix = np.array([length - n for _, n, length in mine], np.int32)
    visible = np.concatenate([t[0] for t in trees if t is not None])
    return Tree(upload(prefix, device), upload(visible, device))
