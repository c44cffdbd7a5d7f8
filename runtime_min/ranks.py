"""The ranks of one artifact at run time: process groups and the sums between them. The same code over gloo and NCCL."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from specs.errors import InputError
from specs.mesh import Mesh

TIMEOUT = timedelta(minutes=5)


class RanksError(InputError):
    """The processes that were started do not fit the artifact."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers. With tp = world every rank holds every token, so all sums run over all ranks."""

    rank: int
    mesh: Mesh

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over all ranks, in place; the same bits on every rank."""
        if self.mesh.world > 1:
            dist.all_reduce(x)
        return x

    def join(self, x: Tensor) -> Tensor:
        """[T, V / world] of every rank side by side: [T, V]."""
        if self.mesh.world == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.mesh.world)]
        dist.all_gather(parts, x.contiguous())
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
        """Rank 0's value, on every rank."""
        if self.mesh.world > 1:
            dist.broadcast(x, 0)
        return x


def join(mesh: Mesh, rank: int, world: int, device: torch.device, init: str | None = None) -> Ranks:
    """This process as rank `rank` of `world`. `init` is where the ranks meet; None is torchrun's environment."""
    check(mesh, rank, world)
    if world > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        where = device if device.type == "cuda" else None
        dist.init_process_group(backend, init or "env://", TIMEOUT, world, rank, device_id=where)
    return Ranks(rank, mesh)


def check(mesh: Mesh, rank: int, world: int) -> None:
    """RanksError unless these processes can run an artifact of this mesh."""
    if world != mesh.world:
        raise RanksError(
            f"rank {rank}: {world} processes run an artifact of {mesh.world} ranks ({mesh}); "
            f"start {mesh.world}, or convert the artifact again with --world {world}"
        )
    if mesh.tp != mesh.world:
        raise RanksError(
            f"rank {rank}: the artifact has tp {mesh.tp} below world {mesh.world}, groups that serve different "
            f"requests; that cannot be run yet, convert it again with --tp {mesh.world}"
        )


def leave() -> None:
    """Ends the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
