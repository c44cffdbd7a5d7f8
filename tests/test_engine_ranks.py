"""The engine over several ranks: the tokens of one, groups that meet in the experts, and what a death does."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime_min.engine import Engine, EngineError
from runtime_min.messages import Stats, Submit
from runtime_min.ranks import Ranks, RanksError
from runtime_min.remote import Remote
from runtime_min.request import Limits, Media, Request
from runtime_min.sample import Sampling
from specs.mesh import Mesh
from tests.lab import converted

LIMITS = Limits(running=3, step_tokens=40, share=8, cache_tokens=40 * 8, page_tokens=8)
ROOT = Path(__file__).parent.parent


def requests() -> list[Request]:
    return [
        Request(
            prompt=tuple((7 * i + j) % 500 for j in range(3 + 11 * (i % 4))),
            max_tokens=3 + i % 5,
            sampling=Sampling(temperature=(i % 3) / 2, top_p=0.9, seed=i, logprobs=1),
            scored=i == 4,
        )
        for i in range(9)
    ]


def opened(path: Path, limits: Limits = LIMITS) -> Engine:
    return Engine(path, limits, device="cpu", dtype="float64")


@pytest.fixture(scope="module")
def want(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one rank gives."""
    out = tmp_path_factory.mktemp("one") / "artifact"
    converted(demo, out)
    with opened(out) as engine:
        results = engine.generate(requests())
    assert len(results[4].scored) == len(results[4].prompt) - 1
    return [r.ids for r in results]


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(world=2, tp=2, ep=2),
        Mesh(world=2, tp=1, ep=2),
        pytest.param(Mesh(world=4, tp=2, ep=4), marks=pytest.mark.slow),
        pytest.param(Mesh(world=2, tp=1), marks=pytest.mark.slow),
        pytest.param(Mesh(world=4, tp=2, ep=2), marks=pytest.mark.slow),
        pytest.param(Mesh(world=4, tp=1, ep=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_mesh_gives_the_tokens_of_one_rank(demo: Path, tmp_path: Path, want: list[list[int]], mesh: Mesh) -> None:
    """Where tp < world, several groups serve these requests, some of them with nothing to do at the end."""
    converted(demo, tmp_path / "a", world=mesh.world, tp=mesh.tp, ep=mesh.ep)
    with opened(tmp_path / "a") as engine:
        for _ in range(2):
            assert [r.ids for r in engine.generate(requests())] == want
        first = engine.generate(requests()[:1])
        assert first[0].ids == want[0]
    assert not multiprocessing.active_children()


def test_a_dead_rank_fails_what_is_pending_and_ends_the_others(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "a", world=2, tp=2)
    engine = opened(tmp_path / "a", replace(LIMITS, cache_tokens=4000))
    link = engine.link
    assert isinstance(link, Remote)
    ids = [engine.submit(Request(prompt=(1, 2, 3), max_tokens=1000)) for _ in range(3)]
    while not engine.step(wait=1.0):
        pass
    victim = link.processes.processes[1].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    begin, ended = time.monotonic(), {}
    while engine.unfinished:
        ended |= {e.id: e for e in engine.step(wait=1.0) if e.finish}
    assert time.monotonic() - begin < 10
    assert sorted(ended) == ids and all(e.finish == "error" for e in ended.values())
    assert "rank 1 of 2 was killed by signal 9" in str(ended[0].error)
    assert all(p.exitcode is not None for p in link.processes.processes)
    with pytest.raises(EngineError, match="killed by signal 9"):
        engine.submit(Request(prompt=(1,)))
    engine.close()


OWNER = """
import sys
from runtime_min.engine import Engine
from runtime_min.request import Limits, Request

if __name__ == "__main__":
    engine = Engine(sys.argv[1], Limits(running=2, cache_tokens=4096), device="cpu")
    engine.submit(Request(prompt=(1, 2, 3), max_tokens=3000))
    while not engine.step(wait=1.0):
        pass
    print(*(p.pid for p in engine.link.processes.processes), flush=True)
    while engine.step(wait=1.0) is not None:
        pass
"""


def test_ranks_end_with_the_process_that_owns_them(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "a", world=2, tp=2)
    (tmp_path / "owner.py").write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path / "a")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        ranks = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(ranks) == 2
        owner.kill()
    begin = time.monotonic()
    while any(map(alive, ranks)):
        assert time.monotonic() - begin < 20
        time.sleep(0.1)


def alive(pid: int) -> bool:
    """Is it running, and not a zombie that nobody waits for?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_must_state_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = [{"artifact": "a", "dtype": "x"}, {"artifact": "a", "dtype": "y"}]
    monkeypatch.setattr(Ranks, "every", lambda self, value: stated)
    with pytest.raises(RanksError, match="rank 1: dtype is y, on rank 0 it is x"):
        Ranks(0, Mesh(world=2, tp=2)).agree(stated[0])
    monkeypatch.setattr(Ranks, "every", lambda self, value: stated[:1] * 2)
    Ranks(0, Mesh(world=2, tp=2)).agree(stated[0])


def test_ranks_that_differ_do_not_start(demo: Path, tmp_path: Path) -> None:
    """Two processes started by hand, one of which wants another epsilon."""
    converted(demo, tmp_path / "a", world=2, tp=2)
    command = [sys.executable, "-m", "runtime_min", "generate", str(tmp_path / "a"), "--device", "cpu", "--ids", "1"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [*command, "--inner-eps", eps], cwd=ROOT, env=os.environ | common | {"RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank, eps in enumerate(("1e-6", "1e-5"))
    ]  # fmt: skip
    said = [p.communicate(timeout=100)[1] for p in ranks]
    assert all(p.returncode == 1 for p in ranks)
    assert all("rank 1: inner epsilon is 1e-05, on rank 0 it is 1e-06" in s for s in said)


@pytest.mark.slow
def test_a_cli_run_of_groups(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "a", world=2, tp=1, ep=2)
    command = [sys.executable, "-m", "runtime_min", "generate", str(tmp_path / "a"), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--ids", "1,2,3", "--max-tokens", "4"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_much_to_send_both_ways_at_once_stops_nobody() -> None:
    """Each side sends more than a pipe holds before it reads."""
    link, sent = Remote.__new__(Remote), 4 << 20
    link.pipe, theirs = multiprocessing.Pipe()
    link.sender = ThreadPoolExecutor(1)
    link.processes = SimpleNamespace(sentinels=[], alive=lambda: True)  # type: ignore[assignment]

    def rank() -> int:
        theirs.send(([b"x" * sent], Stats()))
        return len(theirs.recv_bytes())

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(rank)
        media = (Media(position=0, tokens=1, digest=b"", item=b"x" * sent),)
        request = Request(prompt=(1,), media=media)
        events = link.step([Submit(id=0, request=request, seed=0)], 10.0)
        assert [len(e) for e in events] == [sent] and other.result(10) > sent  # type: ignore[arg-type]
