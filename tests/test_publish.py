"""An artifact on the hub: refused beforehand or proven afterwards, whatever the hub does in between."""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from convert.card import title
from convert.cli import main
from convert.hub import wait
from convert.hub.bundle import MOST_IN_COMMIT, bundle, limits
from convert.hub.publish import publish
from convert.hub.wait import HubError
from runtime_min.kernels import index
from specs import manifest
from specs.errors import ArtifactError
from tests.hub import Fault, Hub, Repo, environment, hub, kiln, point_at
from tests.lab import converted, copied, tree

MESH = {"world": 2, "tp": 2}
REPO = "someone/artifact"
COMMIT = "POST .*/commit/main"


@pytest.fixture(scope="module")
def sealed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sealed") / "artifact"
    converted(demo, out, **MESH)
    weights = manifest.read(out)["digest"]
    folder = index.folder(out, "sm90")
    folder.mkdir(parents=True)
    (folder / "index.json").write_bytes(index.sealed("sm90", weights, "3.6.0", []))
    return out


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub() as running:
        point_at(running, monkeypatch)
        monkeypatch.setattr(wait, "LONGEST", 0.05)
        yield running


def files_of(repo: Repo) -> dict[str, bytes]:
    return {n: d for n, d in repo.files.items() if n != ".gitattributes"}


def steps(repo: Repo) -> list[set[str]]:
    """What each commit added."""
    trees = list(repo.commits.values())
    return [set(b) - set(a) for a, b in pairwise(trees)]


def test_the_hub_holds_the_artifact_and_its_manifest_came_last(server: Hub, sealed: Path) -> None:
    done = publish(sealed, REPO, tag="v1")
    repo = server.repos[REPO]
    assert files_of(repo) == tree(sealed)
    folders = [{str(Path(n).parent) for n in added} for added in steps(repo)]
    assert folders == [
        {"."}, {"kernels/sm90"}, {"vision"}, {"weights/common"}, {"weights/rank-00"}, {"weights/rank-01"}, {"."},
    ]  # fmt: skip
    assert steps(repo)[-1] == {"manifest.json", "README.md"} and "LICENSE" in steps(repo)[0]
    assert repo.tags == {"v1": done.commit} and done.commit == repo.head and not repo.private
    sent, commits = len(server.asked("PUT /lfs")), len(repo.commits)
    again = publish(sealed, REPO, tag="v1")
    assert again.missing == {} and again.commit == done.commit
    assert (len(server.asked("PUT /lfs")), len(repo.commits)) == (sent, commits)


def test_nothing_tells_who_converted_where_and_how(
    server: Hub, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: "odd-host-name")
    model, out = copied(demo, tmp_path / "odd-place"), tmp_path / "artifact"
    monkeypatch.setattr(sys, "argv", ["kiln", "convert", str(model)])
    assert CliRunner().invoke(main, ["convert", str(model), "--tp", "2", "--out", str(out)]).exit_code == 0
    told = (out / "provenance.json").read_text()
    assert "odd-host-name" in told and f"convert {model}" in told
    publish(out, REPO)
    for sent in server.repos[REPO].files.values():
        assert b"odd-host-name" not in sent and b"odd-place" not in sent and str(tmp_path).encode() not in sent


def test_a_dry_run_sends_nothing(server: Hub, sealed: Path) -> None:
    result = CliRunner().invoke(main, ["publish", str(sealed), REPO, "--dry-run", "--json"])
    facts = json.loads(result.stdout)
    assert result.exit_code == 0 and not server.repos and not server.asked("POST|PUT")
    assert facts["commit"] is None and sum(facts["sent"].values()) == facts["bytes"]
    assert facts["bytes"] == sum(map(len, tree(sealed).values()))
    publish(sealed, REPO)
    text = CliRunner().invoke(main, ["publish", str(sealed), REPO, "--dry-run"]).stdout
    assert "nothing to send" in text and "nothing was sent" in text


def test_private_is_private(server: Hub, sealed: Path) -> None:
    publish(sealed, REPO, private=True)
    assert server.repos[REPO].private
    server.repos["someone/open"] = Repo({"1" * 40: {}})
    with pytest.raises(HubError, match="is public already"):
        publish(sealed, "someone/open", private=True)


def test_what_must_not_go_to_the_hub_is_listed_before_anything_is_sent(
    server: Hub, sealed: Path, tmp_path: Path
) -> None:
    """One file of 51 GB, 10,001 files in a folder, a token, no licence, kernels of other weights: one list."""
    artifact = copied(sealed, tmp_path / "a")
    with (artifact / "vision/huge.safetensors").open("wb") as f:
        f.truncate(51_000_000_000)
    (artifact / "many").mkdir()
    for i in range(10_001):
        (artifact / "many" / str(i)).touch()
    (artifact / "token").write_text("hf_secret")
    (artifact / "kernels/sm90/index.json").write_bytes(index.sealed("sm90", "0" * 64, "3.6.0", []))
    with pytest.raises(ArtifactError) as caught:
        publish(artifact, REPO)
    said = "\n".join(caught.value.problems)
    for problem in (
        "huge.safetensors: 51.0 GB, a file on the hub has at most 50 GB",
        "many: 10,001 files, a folder has at most 10,000",
        "token: is no part of the artifact",
        "index.json: was compiled for other weights",
    ):
        assert problem in said
    assert not server.log
    many = {f"weights/{i // 5000}/{i}": 1 for i in range(100_001)}
    assert list(limits(Path("a"), many)) == ["a: 100,001 files, a repository has at most 100,000"]


def test_weights_without_licence_or_with_changed_bytes_are_not_sent(
    server: Hub, demo: Path, sealed: Path, tmp_path: Path
) -> None:
    bare = copied(demo, tmp_path / "bare")
    (bare / "LICENSE").unlink()
    converted(bare, tmp_path / "unlicensed", **MESH)
    with pytest.raises(ArtifactError, match="must not be published without their licence"):
        publish(tmp_path / "unlicensed", REPO)
    artifact = copied(sealed, tmp_path / "a")
    part = sorted((artifact / "weights/rank-00").glob("*.safetensors"))[1]
    flip(part)
    with pytest.raises(ArtifactError, match=rf"{part.name}: sha256 .*, expected"):
        publish(artifact, REPO)
    assert not any("weights/rank-00" in n for n in server.repos[REPO].files)
    part.unlink()
    with pytest.raises(ArtifactError, match=f"{part.name}: not there"):
        publish(artifact, REPO)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_faults_of_the_hub_are_waited_for(server: Hub, sealed: Path) -> None:
    """429 with a wait in either header, 503 on commits and objects, cut connections, a lost answer."""
    server.faults = [
        Fault(COMMIT, status=429, headers={"Retry-After": "2"}),
        Fault(COMMIT, skip=1, status=429, headers={"RateLimit": '"api";r=0;t=1'}),
        Fault(COMMIT, skip=2, times=2, status=503),
        Fault(COMMIT, skip=3, cut=True),
        Fault("PUT /lfs", skip=2, times=2, status=503),
        Fault("PUT /lfs", skip=5, times=2, drop=True),
        Fault("GET .*/tree/", skip=3, cut=True),
        Fault("POST .*/preupload", skip=1, status=500),
        Fault("POST .*/tag", status=504),
        Fault("repos/create", status=503),
    ]
    publish(sealed, REPO, tag="v1")
    assert all(f.times == 0 for f in server.faults)
    assert files_of(server.repos[REPO]) == tree(sealed)
    first, second = server.asked(COMMIT)[:2]
    assert second - first >= 2
    assert len(server.asked("PUT /lfs")) == len(server.lfs) + 4


def test_a_hub_that_goes_on_failing_is_said_plainly(server: Hub, sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "TRIES", 2)
    server.faults = [Fault(COMMIT, times=99, status=503)]
    with pytest.raises(HubError, match=r"the hub failed: .*503.*run the same command again"):
        publish(sealed, REPO)
    assert len(server.asked(COMMIT)) == 3
    server.faults = [Fault(COMMIT, status=403)]
    with pytest.raises(HubError, match="your token may not do that"):
        publish(sealed, REPO)


def test_bytes_that_arrive_wrong_are_refused_and_a_rerun_sends_them(server: Hub, sealed: Path) -> None:
    server.faults = [Fault("PUT /lfs", skip=6, flip=True)]
    with pytest.raises(HubError, match=r"the hub failed: .*400.*run the same command again"):
        publish(sealed, REPO)
    assert "manifest.json" not in server.repos[REPO].files
    publish(sealed, REPO)
    assert files_of(server.repos[REPO]) == tree(sealed)


@pytest.mark.parametrize("commits", [0, 3, 6])
def test_killed_between_ranks_a_rerun_sends_the_rest_only(
    server: Hub, sealed: Path, tmp_path: Path, commits: int
) -> None:
    """Killed while the hub has the commit but not yet answered."""
    command = [sys.executable, "-m", "convert", "publish", str(sealed), REPO]
    child = subprocess.Popen(command, env=environment(server, tmp_path), stderr=subprocess.DEVNULL)
    server.faults = [Fault(COMMIT, skip=commits, then=lambda: os.kill(child.pid, signal.SIGKILL))]
    assert child.wait() == -signal.SIGKILL
    before = {oid for oid in server.lfs}
    assert "manifest.json" not in server.repos[REPO].files or commits == 6
    server.log.clear()
    done = publish(sealed, REPO)
    assert files_of(server.repos[REPO]) == tree(sealed) and done.commit == server.repos[REPO].head
    assert len(server.asked("PUT /lfs")) == len(server.lfs) - len(before)


def test_a_repository_of_another_artifact_is_left_alone(server: Hub, sealed: Path, demo: Path, tmp_path: Path) -> None:
    publish(sealed, REPO, tag="v1")
    converted(demo, tmp_path / "other", world=1, tp=1)
    before = dict(server.repos[REPO].commits)
    with pytest.raises(HubError, match="holds another finished artifact"):
        publish(tmp_path / "other", REPO)
    server.repos[REPO].commits["2" * 40] = {n: d for n, d in server.repos[REPO].files.items() if n != "manifest.json"}
    with pytest.raises(HubError, match=r"weights/rank-01/index.json: belongs to another artifact"):
        publish(tmp_path / "other", REPO)
    publish(sealed, REPO)
    with pytest.raises(HubError, match="tag v1 is at commit"):
        publish(sealed, REPO, tag="v1")
    assert list(server.repos[REPO].commits)[: len(before)] == list(before)


def test_bytes_that_arrived_otherwise_are_named(server: Hub, sealed: Path) -> None:
    """The hub's own digests are what counts, whatever the transport said."""
    name = "weights/rank-01/part-01.safetensors"
    server.damaged = {name}
    with pytest.raises(HubError, match=rf"(?s){name}: .* sha256 .*; expected .*run the same command again"):
        publish(sealed, REPO, tag="v1")
    assert not server.repos[REPO].tags
    server.damaged = set()
    publish(sealed, REPO, tag="v1")
    assert server.repos[REPO].tags


def test_many_files_make_more_commits(sealed: Path, tmp_path: Path) -> None:
    artifact = copied(sealed, tmp_path / "a")
    (artifact / "tuning").mkdir()
    for i in range(MOST_IN_COMMIT + 1):
        (artifact / f"tuning/{i:03d}.json").write_text("{}")
    commits = bundle(artifact).commits
    assert [len(commits[f"tuning, part {i}"]) for i in (1, 2)] == [MOST_IN_COMMIT, 1]


def test_the_command_line(server: Hub, sealed: Path, tmp_path: Path) -> None:
    done = kiln(server, tmp_path, "publish", str(sealed), REPO, "--tag", "v1")
    assert done.returncode == 0 and "the hub's digests are the manifest's at commit" in done.stdout, done.stderr
    assert "part-00" not in done.stderr
    result = CliRunner().invoke(main, ["publish", str(sealed), "nonsense"])
    assert result.exit_code == 2 and "expected owner/name" in result.stderr
    artifact = copied(sealed, tmp_path / "a")
    (artifact / "notes.txt").touch()
    result = CliRunner().invoke(main, ["publish", str(artifact), REPO])
    assert result.exit_code == 1 and "notes.txt: is no part of the artifact" in result.stderr


def test_the_card_names_base_model_and_licence(sealed: Path) -> None:
    lines = (sealed / "README.md").read_text().splitlines()
    assert {"license: other", "license_link: LICENSE", "library_name: kiln"} <= set(lines)
    assert "pipeline_tag: image-text-to-text" in lines and any(
        "tp2" in line and "pre-sharded" in line for line in lines
    )
    assert title(b"\n  Modified MIT License\n\nCopyright") == "modified-mit" and title(b"") == "other"
