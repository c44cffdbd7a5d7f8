"""All ranks of an artifact in one process and on one device, one thread a rank: sums and joins without a network."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from runtime_min.ranks import Ranks
from specs.mesh import Mesh

T = TypeVar("T")


@dataclass
class Meeting:
    """Where the ranks leave their tensors for each other."""

    world: int
    left: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=300)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """What every rank left, in order of ranks."""
        self.left[rank] = x.clone()
        self.barrier.wait()
        parts = [self.left[r] for r in range(self.world)]
        self.barrier.wait()
        return parts


@dataclass(frozen=True, slots=True)
class Together(Ranks):
    """Ranks whose peers are threads of this process. Sums are in the dtype of their terms, one rank after another."""

    meeting: Meeting = field(kw_only=True)

    def sum(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for part in self.meeting.exchange(self.rank, x):
            total += part
        return x.copy_(total)

    def sum_own(self, x: Tensor, rows: int, tokens: int) -> Tensor:
        return self.sum(x)

    def join(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), -1)

    def gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        parts = self.meeting.exchange(self.rank, x)
        assert [len(p) for p in parts] == list(rows)
        return torch.cat(parts)

    def agreed(self, x: Tensor) -> Tensor:
        return x.copy_(self.meeting.exchange(self.rank, x)[0])


def together(mesh: Mesh, work: Callable[[Ranks], T]) -> list[T]:
    """work(ranks) of every rank, at the same time."""
    meeting = Meeting(mesh.world)

    def one(rank: int) -> T:
        try:
            return work(Together(rank, mesh, meeting=meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(mesh.world) as pool:
        return list(pool.map(one, range(mesh.world)))
