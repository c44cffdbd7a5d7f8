"""Prefill attention: each sequence's context is expanded chunk by chunk, so that the workspace has a fixed bound.

Prefill is never captured in a graph, so it may know lengths on the host: `bounds` are those of the batch, and without
them they are read from the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from runtime_min.kernels.launch import LOG2E, WIDEST, Kernels, Launch, power

WORKSPACE = 192 << 20
Bounds = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles of `bm` queries by `bn` keys."""

    bm: int = 128
    bn: int = 64
    warps: int = 8
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """Heads of size nope + rope for scores and value for values. `item`: bytes of an element."""

    op: ClassVar[str] = "mla_prefill"
    heads: int
    nope: int
    rope: int
    value: int
    item: int = 2

    def default(self, shared: int = WIDEST) -> Config:
        if self.item != 2:
            return Config(bm=64, bn=32, warps=4, stages=1)
        return Config() if shared >= WIDEST else Config(stages=2)

    def candidates(self) -> list[Config]:
        tiles = [(128, 128, 8), (128, 64, 4), (128, 64, 8), (64, 64, 4), (64, 128, 4), (128, 96, 8)]
        return [Config(m, n, w, s) for m, n, w in tiles if n & (n - 1) == 0 for s in (2, 3)]


def mla_prefill(
    kernels: Kernels, q_nope: Tensor, q_pe: Tensor, w_uk: Tensor, w_uv: Tensor, rows: Tensor, pages: Tensor,
    cu_q: Tensor, lengths: Tensor, page_tokens: int, scale: float, bounds: Bounds | None = None,
) -> Tensor:  # fmt: skip
    tokens, heads, nope = q_nope.shape
    value, rope = w_uv.shape[1], q_pe.shape[2]
    out = q_nope.new_empty(tokens, heads, value)
    if q_nope.stride()[1:] != (nope, 1) or q_pe.stride()[1:] != (rope, 1) or not rows.is_contiguous():
        raise ValueError(f"mla_prefill: heads are contiguous, found strides {q_nope.stride()} and {q_pe.stride()}")
    config = kernels.pick(Problem(heads, nope, rope, value, q_nope.element_size()))
    starts, cached = bounds if bounds is not None else (cu_q.tolist(), lengths.tolist())
    room = WORKSPACE // (heads * (nope + value) * q_nope.element_size()) // page_tokens * page_tokens
    sequences = (b for b in range(len(cached)) if starts[b + 1] > starts[b])
    for b in sequences:
        low, high = starts[b], starts[b + 1]
        carried = _Carried(q_nope, high - low, value) if cached[b] > room else None
        chunks = list(_chunks(rows, pages[b], cached[b], max(page_tokens, room), page_tokens))
        for first, latents in chunks:
            expanded = expand(latents, w_uk, w_uv)
            _attend(
                kernels, config, q_nope[low:high], q_pe[low:high], latents, expanded, out[low:high], carried,
                cached[b] - (high - low) - first, scale, first == 0, first + len(latents) == cached[b],
            )  # fmt: skip
    return out


class _Carried:
    """Sums and states of the rows of one sequence between its chunks."""

    def __init__(self, like: Tensor, queries: int, value: int) -> None:
        self.acc = torch.empty(queries, like.shape[1], value, dtype=torch.float32, device=like.device)
        self.state = torch.empty(queries, like.shape[1], 2, dtype=torch.float32, device=like.device)


def _chunks(rows: Tensor, pages: Tensor, length: int, room: int, page_tokens: int) -> Iterator[tuple[int, Tensor]]:
    """(first token, cache rows [n, L + R] in order) of every chunk of one sequence."""
    paged = rows.view(-1, page_tokens, rows.shape[1])
    for first in range(0, length, room):
        last = min(first + room, length)
        mine = pages[first // page_tokens : -(-last // page_tokens)]
        yield first, paged.index_select(0, mine).flatten(0, 1)[: last - first]


def expand(latents: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [n, H, D] and values [n, H, V] of every head."""
    latent = latents[:, : w_uk.shape[2]]
    keys, values = (latent @ w.flatten(0, 1).T for w in (w_uk, w_uv))
    return keys.view(len(latents), *w_uk.shape[:2]), values.view(len(latents), *w_uv.shape[:2])


def _attend(
    kernels: Kernels, config: Config, q_nope: Tensor, q_pe: Tensor, latents: Tensor, expanded: tuple[Tensor, Tensor],
    out: Tensor, carried: _Carried | None, behind: int, scale: float, first: bool, last: bool,
) -> None:  # fmt: skip
    queries, heads, nope = q_nope.shape
    keys, values = expanded
    if keys.stride(0) != values.stride(0):
        keys, values = _same_rows(keys, values)
    rope, value = q_pe.shape[2], values.shape[2]
    k_pe = latents[:, latents.shape[1] - rope :]
    acc, state = (carried.acc, carried.state) if carried is not None else (out, out)
    constants = {
        "H": heads, "D": nope, "BD": power(nope), "R": rope, "BR": power(rope), "VD": value, "BV": power(value),
        "BM": config.bm, "BN": config.bn, "FIRST": first, "LAST": last, "STAGES": config.stages,
    }  # fmt: skip
    args = (
        q_nope, q_pe, keys, k_pe, values, out, acc, state, queries, len(latents), behind, scale * LOG2E,
        q_nope.stride(0), q_pe.stride(0), keys.stride(0), k_pe.stride(0),
    )  # fmt: skip
    if any(stride % 8 for stride in args[-4:]):
        raise ValueError(f"mla_prefill: rows are multiples of 8 elements apart, found {args[-4:]}")
    grid = (-(-queries // config.bm), heads, 1)
    kernels.run(Launch(kernel="mla_prefill.attend", grid=grid, args=args, constants=constants, warps=config.warps))


def _same_rows(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same keys and values with rows equally far apart, where heads of the two differ in size."""
    n, heads, _ = keys.shape
    row = heads * max(keys.shape[2], values.shape[2])
    out = []
    for x in (keys, values):
        room = x.new_empty(n, row)[:, : heads * x.shape[2]].view(n, heads, x.shape[2])
        out.append(room.copy_(x))
    return out[0], out[1]
