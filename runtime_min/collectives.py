"""How ranks on GPUs add up: where each of them is, what they can use, and a first sum on the clock.

NCCL adds up, on a CPU gloo. Symmetric memory is for those who ask for it: torch's buffers of each rank that its peers
read over NVLink or PCIe, without multicast. It takes ranks that share one host where TP is the world, there are 2, 4 or
8 of them, each card reaches every other, and a first sum through it comes out right; NCCL takes what it cannot.
"""

import atexit
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specs.errors import InputError
from specs.mesh import Mesh

SUMS = ("nccl", "symmetric", "auto")
# Seconds that the first sum may take once all ranks are there.
PATIENCE = 60.0
BUFFER = 8 << 20
# The largest message in bytes, by ranks, of which each reads all of its peers' (one-shot). Beyond it each adds up its
# share and reads the others' results (two-shot): fewer bytes, one more wait. Two ranks read as much either way.
ONE_SHOT = {2: BUFFER, 4: 512 << 10, 8: 256 << 10}
# What torch's kernels add up, and the bytes they load at once.
DTYPES = (torch.bfloat16, torch.float32)
WORD = 16


class SumsError(InputError):
    """The ranks cannot add up as they were told to, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs, and what it was told. card: what tells GPUs apart, None on a CPU; reach: does this card read
    the others' memory?"""

    rank: int
    host: str
    process: int
    device: str
    card: str | None
    reach: bool
    sums: str | None

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.process}, {self.device})"


def here(rank: int, world: int, device: torch.device, sums: str | None) -> Place:
    card, reach = None, False
    if device.type == "cuda":
        card = str(torch.cuda.get_device_properties(device).uuid)
        others = [i for i in range(world) if i != device.index]
        reach = torch.cuda.device_count() >= world and all(
            torch.cuda.can_device_access_peer(device, other) for other in others
        )
    return Place(
        rank=rank, host=socket.gethostname(), process=os.getpid(), device=str(device), card=card, reach=reach, sums=sums
    )


def check(places: Sequence[Place]) -> None:
    """SumsError unless all ranks were told the same and each has a card of its own."""
    cards = [p.card for p in places if p.card is not None]
    shared = [p for p in places if cards.count(p.card or "") > 1]
    problems = [f"{p}: {len(shared)} ranks share a card, here {p.card}; give each its own" for p in shared]
    problems += [
        f"{p}: --sums is {p.sums}, on rank 0 it is {places[0].sums}; start all ranks alike"
        for p in places
        if p.sums != places[0].sums
    ]
    if problems:
        raise SumsError(problems)


def why_not(places: Sequence[Place], mesh: Mesh) -> str | None:
    """What symmetric memory lacks here, None if nothing is known."""
    if places[0].card is None:
        return "the ranks are on the CPU"
    if mesh.tp != mesh.world:
        return f"TP {mesh.tp} is not the world of {mesh.world}"
    if mesh.world not in ONE_SHOT:
        return f"{mesh.world} ranks, torch has kernels for {', '.join(map(str, ONE_SHOT))}"
    if len({p.host for p in places}) > 1:
        return "the ranks are on several hosts"
    apart = [str(p) for p in places if not p.reach]
    return f"{apart[0]} cannot read all other cards' memory (nvidia-smi topo -p2p r)" if apart else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Symmetric:
    """Sums of all ranks in place, one rank after another in the dtype of the message, so the same bits on each rank.

    buffer: uint8 [BUFFER], reached by all; group: the name of their process group. Calls must not overlap: one buffer
    and its signals serve them all, in the order of one stream. What torch's kernels do not take goes to NCCL.
    """

    buffer: Tensor
    group: str
    one_shot: int

    @classmethod
    def open(cls, world: int, device: torch.device) -> "Symmetric":
        """All ranks at once. RuntimeError where torch cannot share the buffers."""
        from torch.distributed import _symmetric_memory as shared

        group: Any = dist.group.WORLD
        buffer = shared.empty(BUFFER, dtype=torch.uint8, device=device)
        shared.rendezvous(buffer, group.group_name)
        return cls(buffer=buffer, group=group.group_name, one_shot=ONE_SHOT[world])

    def __call__(self, x: Tensor) -> None:
        size = x.numel() * x.element_size()
        if x.dtype not in DTYPES or size > len(self.buffer) or size % WORD or x.data_ptr() % WORD:
            dist.all_reduce(x)
            return
        # A copy of its own: torch's one-shot kernel that copies signals before all threads of a block have stored.
        mine = self.buffer[:size].view(x.dtype).view(x.shape).copy_(x)
        if size <= self.one_shot:
            torch.ops.symm_mem.one_shot_all_reduce_out(mine, "sum", self.group, x)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_out(mine, "sum", self.group, x)


def within(seconds: float, device: torch.device, work: Callable[[], object], told: str) -> None:
    """Runs `work`, which may never return, in a thread. SumsError(told) if it has not returned in time."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            work()
            raised.append(None)
        except BaseException as e:
            raised.append(e)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not raised:
        atexit.register(_exit)
        raise SumsError(told)
    if raised[0] is not None:
        raise raised[0]


def _exit() -> None:
    """Ends the process at once: a thread inside a collective can be neither ended nor waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def tried(add: Callable[[Tensor], object], world: int, rank: int, device: torch.device, numel: int) -> None:
    """RuntimeError unless a sum of small integers comes out right on this rank."""
    x = (torch.arange(numel, device=device) % 8 + rank).to(torch.float32)
    add(x)
    wrong = int((x != (torch.arange(numel, device=device) % 8) * world + sum(range(world))).sum())
    if wrong:
        raise RuntimeError(f"{wrong} of {numel} elements of a first sum are wrong")


def first(places: Sequence[Place], rank: int, device: torch.device) -> None:
    """The first sum of all ranks. SumsError if it does not end in time, as where cards cannot read each other though
    the driver says so."""
    world = len(places)
    told = (
        f"{places[rank]}: the first sum of {world} ranks has not ended after {PATIENCE:.0f} s; the others are "
        f"{', '.join(str(p) for p in places if p.rank != rank)}. On GPUs try NCCL_P2P_DISABLE=1, compare "
        "`nvidia-smi topo -p2p r`, and see NCCL_DEBUG=INFO; between hosts, a firewall and NCCL_SOCKET_IFNAME"
    )
    within(PATIENCE, device, lambda: tried(dist.all_reduce, world, rank, device, 4096), told)


def symmetric(
    places: Sequence[Place], mesh: Mesh, rank: int, device: torch.device, every: Callable[[Any], list[Any]]
) -> tuple[Symmetric | None, str]:
    """Symmetric memory if it was asked for, and what the sums use, in words. SumsError if "symmetric" does not work;
    "auto" is then NCCL, and says why. every: each rank's object, on every rank."""
    asked = places[rank].sums
    plain = "gloo" if places[0].card is None else "NCCL"
    if asked == "nccl":
        if places[0].card is None:
            raise SumsError("--sums nccl: the ranks are on the CPU, where gloo adds up; leave it out")
        return None, "NCCL (asked for)"
    if asked is None:
        return None, plain
    lacking, made = why_not(places, mesh), None
    if lacking is None:
        made, found = _opened(mesh.world, rank, device, str(places[rank]))
        failed = [f for f in every(found) if f is not None]
        lacking = failed[0] if failed else None
    if lacking is None and made is not None:
        return made, (
            f"symmetric memory, one-shot up to {made.one_shot >> 10} KiB, two-shot up to {BUFFER >> 10} KiB, NCCL above"
        )
    if asked == "symmetric":
        raise SumsError(f"--sums symmetric: {lacking}; use --sums nccl or auto, or leave it out")
    return None, plain if plain == "gloo" else f"NCCL, for want of symmetric memory: {lacking}"


def _opened(world: int, rank: int, device: torch.device, place: str) -> tuple[Symmetric | None, str | None]:
    """Symmetric memory that has added up rightly in one shot and in two, or what went wrong on this rank."""
    made: list[Symmetric] = []

    def work() -> None:
        made.append(Symmetric.open(world, device))
        for size in {ONE_SHOT[world], BUFFER}:
            tried(made[0], world, rank, device, size // 4)

    hint = f"{place}: a first sum through symmetric memory has not ended after {PATIENCE:.0f} s; use --sums nccl"
    try:
        within(PATIENCE, device, work, hint)
    except RuntimeError as e:
        return None, f"{place}: {e}"
    return made[0], None
