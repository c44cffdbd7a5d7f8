"""The ranks of one artifact at run time: process groups and the sums between them. The same code over gloo and NCCL."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime_min import collectives
from runtime_min.collectives import Symmetric
from specs.errors import InputError
from specs.mesh import Mesh

TIMEOUT = timedelta(minutes=5)


class RanksError(InputError):
    """The processes that were started do not fit the artifact or each other, or one of them died."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers: mesh.tp neighbours hold the same tokens, world / tp such groups different ones.

    peers: the process group of the neighbours; across: one rank of each group; host: all ranks, for objects. None is
    the process group of all ranks. symmetric: what adds up instead of the process groups; sums: the same in words.
    """

    rank: int
    mesh: Mesh
    peers: Any = None
    across: Any = None
    host: Any = None
    symmetric: Symmetric | None = None
    sums: str = "none"

    @property
    def groups(self) -> int:
        return self.mesh.world // self.mesh.tp

    @property
    def group(self) -> int:
        """Which group this rank is in."""
        return self.rank // self.mesh.tp

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over the group, in place; the same bits on each of its ranks."""
        if self.mesh.tp > 1:
            self._all_reduce(x, self.peers)
        return x

    def _all_reduce(self, x: Tensor, group: Any) -> None:
        if self.symmetric is None:
            dist.all_reduce(x, group=group)
        else:
            self.symmetric(x)

    def join(self, x: Tensor) -> Tensor:
        """[T, V / tp] of every rank of the group side by side: [T, V]."""
        if self.mesh.tp == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.mesh.tp)]
        dist.all_gather(parts, x.contiguous(), group=self.peers)
        return torch.cat(parts, -1)

    def gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """What every rank r holds, [rows[r], W], one below the other: [sum(rows), W]. x is this rank's."""
        if self.mesh.world == 1:
            return x
        parts = [x.contiguous() if r == self.rank else x.new_empty(n, x.shape[1]) for r, n in enumerate(rows)]
        for r, part in enumerate(parts):
            if rows[r]:
                dist.broadcast(part, r)
        return torch.cat(parts)

    def agreed(self, x: Tensor) -> Tensor:
        """The value of the group's first rank, on all its ranks."""
        if self.mesh.tp > 1:
            dist.broadcast(x, self.group * self.mesh.tp, group=self.peers)
        return x

    def brought(self, x: Tensor, rows: int) -> Tensor:
        """x [T, N] of every group, each filled up with zeros to `rows`, below each other: [groups * rows, N]."""
        if self.groups == 1:
            return x
        mine = x.new_zeros(rows, x.shape[1])
        mine[: len(x)] = x
        parts = [torch.empty_like(mine) for _ in range(self.groups)]
        dist.all_gather(parts, mine, group=self.across)
        return torch.cat(parts)

    def place(self, rows: int) -> int:
        """The first of this group's rows in what `brought` laid out."""
        return self.group * rows if self.groups > 1 else 0

    def own(self, x: Tensor, rows: int, tokens: int) -> Tensor:
        """This group's `tokens` rows of what `brought` laid out; a view."""
        return x if self.groups == 1 else x[self.place(rows) : self.place(rows) + tokens]

    def sum_own(self, x: Tensor, rows: int, tokens: int) -> Tensor:
        """Elementwise sum over all ranks, in place, and of it this group's rows."""
        if self.mesh.world > 1:
            self._all_reduce(x, None)
        return self.own(x, rows, tokens)

    def shared(self, value: Any) -> Any:
        """Rank 0's object, on every rank."""
        if self.mesh.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self.host, device=torch.device("cpu"))
        return box[0]

    def every(self, value: Any) -> list[Any]:
        """The object of each rank, in order of ranks."""
        if self.mesh.world == 1:
            return [value]
        out: list[Any] = [None] * self.mesh.world
        dist.all_gather_object(out, value, group=self.host)
        return out

    def agree(self, facts: dict[str, str]) -> None:
        """RanksError on every rank, naming ranks and values, unless all ranks state the same facts."""
        stated = self.every(facts)
        problems = [
            f"rank {rank}: {name} is {theirs.get(name)}, on rank 0 it is {stated[0].get(name)}; start all ranks alike"
            for rank, theirs in enumerate(stated)
            for name in sorted(stated[0] | theirs)
            if theirs.get(name) != stated[0].get(name)
        ]
        if problems:
            raise RanksError(problems)


def join(
    mesh: Mesh, rank: int, world: int, device: torch.device, init: str | None = None, sums: str | None = None
) -> Ranks:
    """This process as rank `rank` of `world`. `init` is where the ranks meet; None is torchrun's environment. sums: one
    of SUMS, None for the better one that works.

    Raises SumsError, on every rank, if they cannot add up.
    """
    check(mesh, rank, world)
    if world == 1:
        if sums is not None:
            raise collectives.SumsError(f"--sums {sums}: one rank has nothing to add up; leave it out")
        return Ranks(rank, mesh)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init or "env://", TIMEOUT, world, rank)
    host = dist.new_group(backend="gloo", timeout=TIMEOUT)
    every = Ranks(rank, mesh, host=host).every
    places = every(collectives.here(rank, world, device, sums))
    collectives.check(places)
    collectives.first(places, rank, device)
    symmetric, told = collectives.symmetric(places, mesh, rank, device, every)
    peers = across = None
    if mesh.tp < world:
        # Every rank makes every group, in the same order.
        tp = mesh.tp
        peers = [dist.new_group(list(range(first, first + tp))) for first in range(0, world, tp)][rank // tp]
        across = [dist.new_group(list(range(place, world, tp))) for place in range(tp)][rank % tp]
    return Ranks(rank, mesh, peers, across, host, symmetric, told)


def check(mesh: Mesh, rank: int, world: int) -> None:
    """RanksError unless there are as many processes as the artifact has ranks."""
    if world != mesh.world:
        raise RanksError(
            f"rank {rank}: {world} processes run an artifact of {mesh.world} ranks ({mesh}); "
            f"start {mesh.world}, or convert the artifact again with --world {world}"
        )


def leave() -> None:
    """Ends the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
