"""A rank's part of a published artifact: nothing more, every byte hashed, whatever the hub does in between."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from convert.cli import main
from convert.hub import wait
from convert.hub.fetch import FOLDER, Wanted, fetch
from convert.hub.publish import publish
from convert.hub.wait import HubError
from runtime_min.artifact import Artifact
from runtime_min.kernels import index
from runtime_min.kernels.index import Compiled
from runtime_min.kernels.record import Variant
from specs import manifest
from specs.errors import ArtifactError, PlanError
from tests.hub import Fault, Hub, environment, hub, kiln, point_at
from tests.lab import converted, tree

MESH = {"world": 2, "tp": 2}
REPO = "someone/artifact"
PART = "weights/rank-01/part-01.safetensors"


@pytest.fixture(scope="module")
def sealed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with what passes for a compiled kernel of two architectures."""
    out = tmp_path_factory.mktemp("sealed") / "artifact"
    converted(demo, out, **MESH)
    for arch in ("sm90", "sm120"):
        folder = index.folder(out, arch)
        folder.mkdir(parents=True)
        (folder / "x.cubin").write_bytes(arch.encode())
        digest = sha256(arch.encode()).hexdigest()
        variant = Variant("rmsnorm.f", (), (), 4, 1)
        row = Compiled(
            variant=variant, file="x.cubin", symbol="f", shared_bytes=0, scratch=(0, 0), threads=128, sha256=digest
        )
        (folder / "index.json").write_bytes(index.sealed(arch, manifest.read(out)["digest"], "3.6.0", [row]))
    return out


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, sealed: Path) -> Iterator[Hub]:
    with hub() as running:
        point_at(running, monkeypatch)
        monkeypatch.setattr(wait, "LONGEST", 0.05)
        publish(sealed, REPO, tag="v1")
        running.log.clear()
        running.sent = 0
        yield running


def test_a_rank_gets_what_it_needs_and_no_more(server: Hub, sealed: Path, tmp_path: Path) -> None:
    out = tmp_path / "a"
    done = fetch(Wanted(repo=REPO, revision="v1", ranks=(1,), arch="sm90"), out)
    whole = tree(sealed)
    mine = {n: d for n, d in whole.items() if not n.startswith(("weights/rank-00", "kernels/sm120"))}
    assert tree(out) == mine and done.already == 0
    assert not server.asked("rank-00|sm120") and not server.leaked
    assert Artifact.open(out, 1).weights(torch.device("cpu"))
    with pytest.raises(ArtifactError, match=r"rank-00/part-00.safetensors: not there, .*; fetch or convert again"):
        Artifact.open(out, 0)
    before = server.sent
    again = fetch(Wanted(repo=REPO, ranks=(1,), arch="sm90"), out)
    assert again.already == again.nbytes and server.sent - before < done.nbytes / 10
    fetch(Wanted(repo=REPO, arch="sm120"), out)
    assert tree(out) == whole and not (out / FOLDER).exists()


def test_faults_of_the_hub_are_waited_for(server: Hub, sealed: Path, tmp_path: Path) -> None:
    oids = [sha256(path.read_bytes()).hexdigest() for path in sorted(sealed.glob("weights/rank-00/*.safetensors"))[:2]]
    server.faults = [
        # Each once: a file that comes wrong twice is damaged on the hub.
        *(Fault(f"GET /lfs/{oid}", flip=True) for oid in oids),
        Fault("GET /lfs", times=3, cut=True),
        Fault("GET .*/resolve/", skip=2, status=429, headers={"Retry-After": "1"}),
        Fault("GET .*/resolve/", skip=4, times=2, status=503),
        Fault("GET .*/tree/", status=500),
        Fault("GET .*manifest.json", flip=True),
    ]
    fetch(Wanted(repo=REPO, arch="sm90"), tmp_path / "a")
    assert all(f.times == 0 for f in server.faults)
    fetch(Wanted(repo=REPO, arch="sm120"), tmp_path / "a")
    assert tree(tmp_path / "a") == tree(sealed)


def test_bytes_that_stay_wrong_get_no_name(server: Hub, tmp_path: Path) -> None:
    """Wrong bytes of equal size, twice: named with both digests; everything else is kept for the next run."""
    oid = next(o for o, d in server.lfs.items() if d == server.repos[REPO].files[PART])
    server.faults = [Fault(oid, times=2, flip=True)]
    out = tmp_path / "a"
    with pytest.raises(HubError, match=rf"{PART}: .* sha256 .*, expected {oid}; the hub's copy is damaged"):
        fetch(Wanted(repo=REPO), out)
    assert not (out / PART).exists() and not (out / f"{PART}.partial").exists() and not (out / "manifest.json").exists()
    server.log.clear()
    fetch(Wanted(repo=REPO), out)
    assert len(server.asked("GET /lfs")) == 1


def test_a_file_that_was_changed_on_the_hub_is_named_before_anything_is_downloaded(server: Hub, tmp_path: Path) -> None:
    repo = server.repos[REPO]
    data = bytearray(repo.files[PART])
    data[1000] ^= 1
    repo.commits["3" * 40] = {**repo.files, PART: bytes(data)}
    with pytest.raises(HubError, match=rf"{PART}: .*sha256 .*; expected .*; publish the artifact again"):
        fetch(Wanted(repo=REPO), tmp_path / "a")
    assert not server.asked("GET /lfs")
    fetch(Wanted(repo=REPO, revision="v1"), tmp_path / "b")
    changed = bytearray((tmp_path / "b" / PART).read_bytes())
    changed[1000] ^= 1
    (tmp_path / "b" / PART).write_bytes(changed)
    result = CliRunner().invoke(main, ["verify", str(tmp_path / "b")])
    assert result.exit_code == 1 and re.search(rf"{PART}: sha256 \w+, expected \w+", result.stderr)


def test_a_killed_fetch_goes_on_in_the_middle_of_a_file(server: Hub, sealed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "convert", "fetch", REPO, "--out", "a", "--arch", "sm90", "--arch", "sm120"]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment(server, tmp_path), stderr=subprocess.DEVNULL)
    server.faults = [Fault("GET /lfs", skip=5, then=lambda: os.kill(child.pid, signal.SIGKILL))]
    assert child.wait() == -signal.SIGKILL
    out = tmp_path / "a"
    assert not (out / "manifest.json").exists()
    want = (sealed / PART).read_bytes()
    (out / PART).unlink(missing_ok=True)
    (out / PART).parent.mkdir(parents=True, exist_ok=True)
    (out / f"{PART}.partial").write_bytes(want[:-1000])
    left = sum(f.stat().st_size for f in sealed.rglob("*.*") if not (out / f.relative_to(sealed)).exists())
    server.sent = 0
    fetch(Wanted(repo=REPO, arch="sm90"), out)
    fetch(Wanted(repo=REPO, arch="sm120"), out)
    assert tree(out) == tree(sealed)
    assert server.sent < left - len(want) + 100_000


def test_a_partial_file_of_other_bytes_is_read_anew(server: Hub, sealed: Path, tmp_path: Path) -> None:
    out = tmp_path / "a"
    (out / FOLDER).mkdir(parents=True)
    (out / PART).parent.mkdir(parents=True)
    (out / f"{PART}.partial").write_bytes(b"x" * 1000)
    (out / "weights/rank-01/part-02.safetensors.partial").write_bytes(bytes((sealed / PART).stat().st_size * 2))
    fetch(Wanted(repo=REPO, ranks=(1,)), out)
    assert (out / PART).read_bytes() == (sealed / PART).read_bytes() and not list(out.rglob("*.partial"))


def test_what_is_not_there_is_said_plainly(server: Hub, sealed: Path, demo: Path, tmp_path: Path) -> None:
    out = tmp_path / "a"
    for wanted, said in (
        (Wanted(repo="someone/nothing"), "no such repository"),
        (Wanted(repo=REPO, revision="v9"), "no such revision"),
        (Wanted(repo=REPO, ranks=(0, 7)), r"has ranks 0..1 \(w2-tp2-ep1\), \[7\] were asked for"),
        (Wanted(repo=REPO, arch="sm80"), r"no kernels for sm80 \(it has sm120, sm90\).*kiln-run compile"),
    ):
        with pytest.raises(HubError, match=said):
            fetch(wanted, out)
    repo = server.repos[REPO]
    repo.commits["4" * 40] = {n: d for n, d in repo.files.items() if n != "manifest.json"}
    with pytest.raises(HubError, match="no artifact or not published to its end"):
        fetch(Wanted(repo=REPO), out)
    with pytest.raises(PlanError, match="is not empty and no unfinished fetch"):
        fetch(Wanted(repo=REPO, revision="v1"), demo)
    fetch(Wanted(repo=REPO, revision="v1", ranks=(0,)), out)
    converted(demo, tmp_path / "other", world=1, tp=1)
    publish(tmp_path / "other", "someone/other")
    with pytest.raises(PlanError, match="holds a part of another artifact"):
        fetch(Wanted(repo="someone/other"), out)


def test_the_command_line(server: Hub, sealed: Path, tmp_path: Path) -> None:
    done = kiln(server, tmp_path, "fetch", f"{REPO}@v1", "--rank", "1", "--out", "a", "--json")
    facts = json.loads(done.stdout)
    assert facts["ranks"] == [1] and facts["already_there"] == 0 and facts["commit"] == server.repos[REPO].head
    result = CliRunner().invoke(main, ["fetch", REPO, "--out", str(tmp_path / "a")])
    assert result.exit_code == 0 and "ranks 0, 1 of someone/artifact" in result.stdout
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "a")]).exit_code == 0
    assert not (tmp_path / "a/provenance.json").exists()
    told = CliRunner().invoke(main, ["inspect", str(tmp_path / "a")])
    assert told.exit_code == 0 and "manifest " in told.stdout and "made " not in told.stdout


def test_nothing_is_converted_into_a_fetched_artifact(server: Hub, demo: Path, tmp_path: Path) -> None:
    fetch(Wanted(repo=REPO), tmp_path / "a")
    before = tree(tmp_path / "a")
    with pytest.raises(PlanError, match="or a fetched one; choose another --out"):
        converted(demo, tmp_path / "a", **MESH)
    converted(tmp_path / "a", tmp_path / "b", world=1, tp=1)
    converted(demo, tmp_path / "c", world=1, tp=1)
    assert tree(tmp_path / "b") == tree(tmp_path / "c") and tree(tmp_path / "a") == before
