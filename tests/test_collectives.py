"""How ranks add up: who may use symmetric memory, what adds up which message, and a first sum that does not end."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime_min import collectives, ranks
from runtime_min.collectives import BUFFER, ONE_SHOT, Place, SumsError, Symmetric, why_not, within
from specs.mesh import Mesh
from tests.lab import converted

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


def places(count: int, **changes: Any) -> list[Place]:
    common = Place(rank=0, host="h", process=7, device="cuda:0", card="", reach=True, sums=None)
    return [replace(common, **({"rank": r, "device": f"cuda:{r}", "card": f"GPU-{r}"} | changes)) for r in range(count)]


@pytest.mark.parametrize(
    ("found", "mesh", "reason"),
    [
        (places(2), Mesh(world=2, tp=2), None),
        (places(8), Mesh(world=8, tp=8, ep=8), None),
        (places(2, card=None), Mesh(world=2, tp=2), "on the CPU"),
        (places(4), Mesh(world=4, tp=2, ep=4), "TP 2 is not the world of 4"),
        (places(16), Mesh(world=16, tp=16), "16 ranks, torch has kernels for 2, 4, 8"),
        ([*places(1), replace(places(2)[1], host="i")], Mesh(world=2, tp=2), "several hosts"),
        ([*places(1), replace(places(2)[1], reach=False)], Mesh(world=2, tp=2), "rank 1 (host h, process 7, cuda:1)"),
    ],
)
def test_who_may_use_symmetric_memory(found: list[Place], mesh: Mesh, reason: str | None) -> None:
    said = why_not(found, mesh)
    assert said is None if reason is None else said is not None and reason in said


def test_ranks_on_one_card_or_told_different_things_are_refused() -> None:
    collectives.check(places(2))
    collectives.check(places(2, card=None))
    with pytest.raises(SumsError, match=r"rank 1 .*: 2 ranks share a card, here GPU-0") as e:
        collectives.check(places(2, card="GPU-0"))
    assert len(e.value.problems) == 2
    with pytest.raises(SumsError, match=r"rank 1 .*: --sums is nccl, on rank 0 it is None"):
        collectives.check([*places(1), replace(places(2)[1], sums="nccl")])


def chosen(monkeypatch: pytest.MonkeyPatch, sums: str | None, opened: tuple[Any, str | None], **changes: Any) -> Any:
    monkeypatch.setattr(collectives, "_opened", lambda *_: opened)
    found = places(2, sums=sums, **changes)
    return collectives.symmetric(found, Mesh(world=2, tp=2), 0, CPU, lambda mine: [mine, None])


def test_what_was_asked_for_is_used_or_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    works = Symmetric(buffer=torch.zeros(16, dtype=torch.uint8), group="g", one_shot=1024), None
    made, told = chosen(monkeypatch, "auto", works)
    assert made is works[0] and told.startswith("symmetric memory, one-shot up to 1 KiB")
    assert chosen(monkeypatch, "symmetric", works)[0] is works[0]
    assert chosen(monkeypatch, "nccl", works) == (None, "NCCL (asked for)")
    broken = None, "rank 0: no such thing"
    assert chosen(monkeypatch, None, works) == (None, "NCCL")
    assert chosen(monkeypatch, "auto", broken) == (
        None,
        "NCCL, for want of symmetric memory: rank 0: no such thing",
    )
    with pytest.raises(SumsError, match="--sums symmetric: rank 0: no such thing; use --sums nccl"):
        chosen(monkeypatch, "symmetric", broken)
    assert chosen(monkeypatch, None, works, card=None) == (None, "gloo")
    for sums in ("nccl", "symmetric"):
        with pytest.raises(SumsError, match=f"--sums {sums}: the ranks are on the CPU"):
            chosen(monkeypatch, sums, works, card=None)
    with pytest.raises(SumsError, match="one rank has nothing to add up"):
        ranks.join(Mesh(), 0, 1, CPU, sums="nccl")


def test_each_message_goes_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernels are stood in for by what they do to one rank: they double what was put into the buffer."""
    called: list[str] = []

    def shot(name: str) -> Any:
        def op(buffer: Any, how: str, group: str, out: Any) -> None:
            called.append(name)
            assert buffer.shape == out.shape and (how, group) == ("sum", "g")
            out.copy_(2 * buffer)

        return op

    def plain(x: Any) -> None:
        called.append("plain")
        x.mul_(2)

    for name in ("one_shot", "two_shot"):
        monkeypatch.setattr(torch.ops.symm_mem, f"{name}_all_reduce_out", shot(name))
    monkeypatch.setattr(collectives.dist, "all_reduce", plain)
    add = Symmetric(buffer=torch.zeros(BUFFER, dtype=torch.uint8), group="g", one_shot=ONE_SHOT[8])
    half = torch.bfloat16
    sizes = {18: "one_shot", 19: "two_shot", 585: "two_shot", 586: "plain"}
    for tokens, how in sizes.items():
        x = torch.randn(tokens, 7168).to(half)
        want = 2 * x
        add(x)
        assert called.pop() == how and torch.equal(x, want)
    for x, how in (
        (torch.ones(8), "one_shot"),
        (torch.ones(7), "plain"),
        (torch.ones(9)[1:], "plain"),
        (torch.ones(8, dtype=torch.float64), "plain"),
    ):
        add(x)
        assert called.pop() == how and torch.equal(x, torch.full_like(x, 2))


def test_work_that_does_not_end_is_left_and_what_it_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []
    monkeypatch.setattr(collectives.atexit, "register", left.append)
    begin = time.monotonic()
    with pytest.raises(SumsError, match="too long"):
        within(0.2, CPU, lambda: time.sleep(20), "too long")
    assert time.monotonic() - begin < 5 and len(left) == 1
    with pytest.raises(ZeroDivisionError):
        within(5, CPU, lambda: 1 / 0, "")
    within(5, CPU, lambda: None, "")
    assert len(left) == 1


def test_a_wrong_sum_is_noticed() -> None:
    collectives.tried(lambda x: x.mul_(3).add_(3), 3, 0, CPU, 64)
    with pytest.raises(RuntimeError, match="1 of 64 elements of a first sum are wrong"):
        collectives.tried(lambda x: x.mul_(3).add_(3)[0].sub_(1), 3, 0, CPU, 64)


DELAYED = """
import sys, time
import torch.distributed as dist
from runtime_min import collectives
from runtime_min.cli import main

if __name__ == "__main__":
    collectives.PATIENCE = 2.0
    real = dist.all_reduce

    def late(*args, **kwargs):
        time.sleep(60)
        return real(*args, **kwargs)

    if "1" == sys.argv.pop(1):
        dist.all_reduce = late
    main()
"""


def test_a_first_sum_that_does_not_end_stops_every_rank_and_says_who_and_where(demo: Path, tmp_path: Path) -> None:
    """Two processes started by hand, one of which comes to the first sum much later."""
    converted(demo, tmp_path / "a", world=2, tp=2)
    (tmp_path / "delayed.py").write_text(DELAYED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [str(tmp_path / "a"), "--device", "cpu", "--ids", "1"]
    begin = time.monotonic()
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "delayed.py"), str(rank), "generate", *command],
            env=os.environ | common | {"RANK": str(rank), "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [p.communicate(timeout=60)[1] for p in started]
    assert time.monotonic() - begin < 50
    for rank, (process, text) in enumerate(zip(started, said, strict=True)):
        me, other = (f"rank {r} (host {socket.gethostname()}, process {started[r].pid}, cpu)" for r in (rank, 1 - rank))
        assert f"error: {me}: the first sum of 2 ranks has not ended after 2 s; the others are {other}." in text
        assert "NCCL_P2P_DISABLE=1" in text and process.returncode == 1
