"""Converting from the hub through a small disk, and some ranks only: the bytes of a whole conversion from a copy."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from convert.cli import main
from convert.hub import stage as staging
from convert.hub import wait
from convert.hub.stage import Stage, await_shard
from convert.hub.tree import Remote
from convert.pipeline import convert
from convert.readers.hub_stream import HubStream
from convert.readers.safetensors_dir import SafetensorsDir
from convert.repack import pool
from convert.repack.assemble import steps, tensors
from convert.repack.clock import Clock
from convert.shard.plan import Plan, plan
from runtime_min.artifact import Artifact
from specs.config import read_config
from specs.errors import ArtifactError, PlanError, SourceError
from specs.mesh import Mesh
from specs.schema import load
from tests.hub import COMMIT, Fault, Hub, environment, hub, point_at
from tests.lab import converted, planned, tree

MESH = {"world": 2, "tp": 2}


@pytest.fixture
def server(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with hub(demo) as running:
        point_at(running, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(wait, "LONGEST", 0.05)
        monkeypatch.setattr(staging, "PIECE", 100_000)
        yield running


@pytest.fixture(scope="module")
def local(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a conversion of a copy in the hub's cache gives."""
    folder = tmp_path_factory.mktemp("local")
    snapshot = folder / f"models--someone--model/snapshots/{COMMIT}"
    snapshot.mkdir(parents=True)
    for file in demo.iterdir():
        shutil.copy(file, folder / file.name)
        (snapshot / file.name).symlink_to(folder / file.name)
    converted(snapshot, folder / "out", **MESH)
    return tree(folder / "out")


def planned_from(source: HubStream) -> Plan:
    return plan(load("kimi_k2_6"), read_config(source.config), source.header, Mesh(**MESH))


def streamed(out: Path, workers: int = 2) -> None:
    source = HubStream("someone/model", None)
    convert(planned_from(source), source, out, workers)


def sizes(demo: Path) -> tuple[int, int]:
    """Bytes of all files, and of what is read of them for their headers."""
    shards = [f.stat().st_size for f in demo.glob("*.safetensors")]
    return sum(f.stat().st_size for f in demo.iterdir()), sum(min(100_000, n) for n in shards)


def test_streamed_is_what_a_local_copy_gives(server: Hub, demo: Path, local: dict[str, bytes], tmp_path: Path) -> None:
    """Every shard is sent once, apart from its header, and none is left."""
    streamed(tmp_path / "a")
    assert tree(tmp_path / "a") == local and not list(tmp_path.rglob("model-*.safetensors"))
    total, headers = sizes(demo)
    assert server.sent < total + headers + 100_000 and not server.leaked


def test_processes_stream_too(
    server: Hub, local: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "LEAST_BYTES", 1)
    streamed(tmp_path / "a", workers=8)
    assert tree(tmp_path / "a") == local


def test_faults_of_the_hub_are_waited_for(server: Hub, local: dict[str, bytes], tmp_path: Path) -> None:
    """429, 503, cut connections, and wrong bytes of equal size once."""
    server.faults = [
        Fault("GET .*/resolve/.*safetensors$", skip=1, status=429, headers={"Retry-After": "1"}),
        Fault("GET .*/resolve/.*safetensors$", skip=2, times=2, status=503),
        Fault("GET /lfs", skip=3, times=4, cut=True),
        Fault("GET /lfs", skip=20, flip=True),
    ]
    streamed(tmp_path / "a")
    assert tree(tmp_path / "a") == local and all(f.times == 0 for f in server.faults)


def test_a_shard_that_stays_damaged_is_named_and_nothing_is_sealed(
    server: Hub, demo: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    shards = len(list(demo.glob("*.safetensors")))
    server.faults = [Fault("GET /lfs", skip=shards + 3, times=9999, flip=True)]
    with pytest.raises(SourceError, match=r"safetensors: .* sha256 .*, expected .*; the hub's copy is damaged"):
        streamed(tmp_path / "a")
    assert not (tmp_path / "a/manifest.json").exists()
    server.faults = []
    streamed(tmp_path / "a")
    assert tree(tmp_path / "a") == local


def test_killed_it_goes_on_in_the_middle_of_a_shard(
    server: Hub, demo: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "convert", "convert", "someone/model", "--tp", "2", "--out", "a", "--stream"]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment(server, tmp_path), stderr=subprocess.DEVNULL)
    shards = sorted(demo.glob("*.safetensors"))
    server.faults = [Fault("GET /lfs", skip=len(shards), then=lambda: os.kill(child.pid, signal.SIGKILL))]
    assert child.wait() == -signal.SIGKILL
    folder = tmp_path / "a/.convert/shards"
    largest = max(shards, key=lambda f: f.stat().st_size)
    (folder / f"{largest.name}.partial").write_bytes(largest.read_bytes()[:-1000])
    before = server.sent
    streamed(tmp_path / "a")
    assert tree(tmp_path / "a") == local
    total, headers = sizes(demo)
    assert server.sent - before < total + headers - largest.stat().st_size + 200_000


def bare(needs: dict[int, set[str]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A stage whose downloads are immediate."""
    names = sorted({s for shards in needs.values() for s in shards})
    monkeypatch.setattr(staging, "download", lambda place, target, *_: target.write_text(place.path))
    return Stage("someone/model", "c", {n: Remote(10, "d", "b") for n in names}, needs, folder)


def test_shards_come_in_order_a_few_at_a_time_and_go_after_their_last_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {0: {"a", "b", "c", "d"}, 1: {"d", "e"}, 2: {"f"}, 3: {"g", "a"}, 4: {"h"}}
    stage, folder = bare(needs, tmp_path / "s", monkeypatch), tmp_path / "s"
    assert stage.peak == (4 + staging.AHEAD) * 10

    def settled(want: str) -> None:
        found = None
        for _ in range(500):
            if (found := "".join(sorted(p.name for p in folder.iterdir()))) == want:
                break
            time.sleep(0.01)
        time.sleep(0.05)
        assert found == want == "".join(sorted(p.name for p in folder.iterdir()))

    with stage:
        settled("abcdef")
        stage.finished(0)
        settled("adefg")
        stage.finished(1)
        settled("afgh")
        for job in (2, 3, 4):
            stage.finished(job)
        settled("")
    assert not folder.exists()


def test_the_earliest_job_always_gets_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {i: {f"s{i:02d}", f"s{i + 1:02d}", f"s{(7 * i) % 40:02d}"} for i in range(39)}
    with bare(dict(needs), tmp_path / "s", monkeypatch) as stage:
        for job, shards in needs.items():
            for shard in shards:
                reader = threading.Thread(target=await_shard, args=(tmp_path / "s", shard), daemon=True)
                reader.start()
                reader.join(10)
                assert not reader.is_alive()
            stage.finished(job)


def test_what_a_job_reads_is_what_its_steps_ask_for(demo: Path) -> None:
    asked: set[str] = set()

    class Asked(SafetensorsDir):
        def rows(self, name: str, low: int, high: int) -> torch.Tensor:
            asked.add(name)
            return super().rows(name, low, high)

    made, source = planned(demo, 200_000, world=4, tp=2, ep=2), Asked(demo)
    for job in made.jobs:
        asked.clear()
        for step in steps(job, made, source, Clock()):
            step.run()
        assert asked == tensors(job)


def test_no_room_for_what_passes_through_is_said_before(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned_from(HubStream("someone/model", None))
    free = sum(f.size for job in made.jobs for f in job.files.values()) + (64 << 20) + 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(PlanError, match=r"disk: .* needs .* GB more"):
        streamed(tmp_path / "a")


@pytest.mark.parametrize("mesh", [{"tp": 4}, {"tp": 2, "ep": 4}, {"tp": 1, "ep": 2}])
def test_some_ranks_are_the_files_of_a_whole_conversion(demo: Path, tmp_path: Path, mesh: dict[str, int]) -> None:
    source = SafetensorsDir(demo)
    chosen = Mesh(world=4, **mesh)
    made = plan(load("kimi_k2_6"), read_config(source.config), source.header, chosen, ranks=(3, 0))
    convert(made, source, tmp_path / "part", 2)
    converted(demo, tmp_path / "whole", world=4, **mesh)
    whole, part = tree(tmp_path / "whole"), tree(tmp_path / "part")
    own = ("manifest.json", "README.md", "weights/rank-01", "weights/rank-02")
    assert {n for n in set(whole) - set(part) if not n.startswith(own)} == set()
    assert all(part[n] == whole[n] for n in part if not n.startswith(own))
    assert not [n for n in part if n.startswith(own[2:])]
    sealed, full = (json.loads(files["manifest.json"]) for files in (part, whole))
    assert sealed["ranks"] == [0, 3] and "ranks" not in full and sealed["logical"] == full["logical"]
    assert Artifact.open(tmp_path / "part", 3).weights(torch.device("cpu"))
    with pytest.raises(ArtifactError, match="holds ranks 00, 03 only, rank 01 was asked for"):
        Artifact.open(tmp_path / "part", 1)


def test_a_part_says_that_it_is_one(demo: Path, tmp_path: Path) -> None:
    out, run = str(tmp_path / "a"), CliRunner().invoke
    assert run(main, ["convert", str(demo), "--tp", "2", "--ranks", "1", "--out", out]).exit_code == 0
    assert "holds ranks 1 only" in run(main, ["inspect", out]).stdout
    done = run(main, ["verify", out])
    assert done.exit_code == 0 and "holds ranks 1 of 2 only" in done.stderr and "(as recorded)" in done.stdout
    elsewhere = ["--out", str(tmp_path / "b")]
    for args in (["verify", out, "--against", str(demo)], ["convert", out, *elsewhere], ["publish", out, "someone/a"]):
        done = run(main, args)
        assert done.exit_code == 1 and "holds ranks 1 of 2 only" in done.stderr, args
    again = run(main, ["convert", str(demo), "--tp", "2", "--ranks", "0", "--out", out])
    assert again.exit_code == 1 and "of another source, mesh or version" in again.stderr
    wrong = run(main, ["convert", str(demo), "--tp", "2", "--ranks", "0,5", *elsewhere])
    assert wrong.exit_code == 1 and "ranks 5: w2-tp2-ep1 has ranks 0..1" in wrong.stderr
    assert run(main, ["convert", str(demo), "--ranks", "x"]).exit_code == 2
    assert run(main, ["convert", str(demo), "--stream"]).exit_code == 2
    part = sorted((tmp_path / "a/weights/rank-01").glob("*.safetensors"))[0]
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    done = run(main, ["verify", out])
    assert done.exit_code == 1 and f"{part.name}: sha256" in done.stderr
