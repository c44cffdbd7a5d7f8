"""probe and doctor: every line right, every no-go with what to do, and no weight read for it."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from convert.cli import main
from convert.demo.drafts import write_draft
from convert.probe import card, host, kernels
from convert.probe.doctor import Gpu, Patient, doctor
from convert.probe.line import Line, go
from convert.probe.probe import Question, probe
from convert.probe.speed import disk_speed
from specs import manifest
from specs.config import read_config
from specs.mesh import Mesh
from specs.packages import KNOWN_GOOD
from specs.schema import archs
from tests.fullsize import k26_config, k26_header, write_sparse
from tests.lab import converted, copied

SOURCE_BYTES = 595_148_192_736
TOKEN_BYTES = 70_272
GB = 10**9


def kiln(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def asked(*args: object) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and the lines of a command's --json by name."""
    result = kiln(*args, "--json")
    facts = json.loads(result.stdout)
    assert facts["go"] == (result.exit_code == 0)
    return result.exit_code, {line["name"]: line for line in facts["lines"]}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released checkpoint with holes for weights."""
    folder = tmp_path_factory.mktemp("sparse") / "Kimi-K2.6"
    write_sparse(folder, k26_header(), k26_config())
    (folder / "LICENSE").write_text("Modified MIT License\n\nCopyright\n")
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: modified-mit\n---\n# Kimi\n")
    return folder


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 2 TB."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2000 * GB}))


def test_the_full_checkpoint_from_headers_alone(sparse: Path, roomy: None) -> None:
    begin = time.monotonic()
    code, lines = asked("probe", sparse, "--arch", "sm90", "--world", 8, "--tp", 8, "--ep", 8, "--context", 262_144)
    assert time.monotonic() - begin < 60
    assert code == 0 and {line["verdict"] for line in lines.values()} <= {"go", "warn"}
    assert lines["tensors"]["facts"] == {"tensors": 208_550, "bytes": SOURCE_BYTES, "dropped": {}}
    ranks, shared = lines["plan"]["facts"]["rank_bytes"], lines["plan"]["facts"]["shared_bytes"]
    assert len(ranks) == 8 and len(set(ranks)) == 1 and sum(ranks) + shared == SOURCE_BYTES - 552_960
    memory = lines["gpu memory"]["facts"]
    assert memory["cache_bytes_per_token"] == TOKEN_BYTES and memory["cache_bytes"] == 262_144 * TOKEN_BYTES
    assert memory["weights_bytes"] == ranks[0] + shared and memory["card_bytes"] == 141 * GB
    reserves = memory["graph_bytes"] + memory["workspace_bytes"] + memory["driver_bytes"]
    assert memory["needed_bytes"] == memory["weights_bytes"] + memory["cache_bytes"] + reserves
    assert memory["room_tokens"] == (141 * GB - memory["weights_bytes"] - reserves) // TOKEN_BYTES
    assert lines["disk"]["facts"]["artifact_bytes"] > SOURCE_BYTES - 552_960
    assert lines["licence"]["facts"] == {"files": ["LICENSE"], "named": "modified-mit"}
    assert lines["tokenizer"]["verdict"] == "warn"
    # Holes read from nowhere, and are never taken for a fast disk.
    assert "mostly holes" in lines["time"]["found"] and not lines["time"]["facts"]["disk_measured"]
    assert lines["time"]["facts"]["load_seconds"] == pytest.approx(SOURCE_BYTES / 3e9, rel=0.01)


def test_a_card_that_is_too_small_gets_a_context_that_fits() -> None:
    """Eight ranks of the real model on cards of 96 GB."""
    dims, small = read_config(k26_config()).text, card.nominal(archs()["sm120"], None)
    weights = 77_116_000_000
    line = card.memory_line(small, weights, dims, None)
    assert line.verdict == "no-go" and line.facts["cache_bytes"] == 262_144 * TOKEN_BYTES
    room = line.facts["room_tokens"]
    assert f"--context {room}" in line.do
    assert card.memory_line(small, weights, dims, room).verdict == "go"
    assert card.memory_line(small, weights, dims, room + 1).verdict == "no-go"
    larger = card.nominal(archs()["sm120"], 200)
    line = card.memory_line(larger, weights, dims, None)
    assert line.verdict == "go" and "by --gpu-memory" in line.found


def test_the_screen_says_what_to_do(demo: Path, tmp_path: Path) -> None:
    shown = kiln("probe", demo, "--tp", 2, "--out", tmp_path / "o")
    assert shown.exit_code == 0 and shown.stdout.splitlines()[-1] == "go"
    assert len(shown.stdout.splitlines()) < 40 and max(map(len, shown.stdout.splitlines())) <= 120
    shown = kiln("probe", demo, "--tp", 3)
    assert shown.exit_code == 1 and "no-go  plan" in shown.stdout and "-> legal --tp: 1, 2, 4, 8" in shown.stdout
    assert "not asked   layouts, kernels, disk, time, gpu memory" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "no-go for 1 reasons"
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("probe", "MODEL", "--tp", 2, "--draft", "/nowhere"), 1, "/nowhere: does not exist"),
        (("probe", "MODEL", "--context", 0), 2, "not in the range"),
        (("probe", "MODEL", "--gpu-memory", -1), 2, "not in the range"),
        (("probe", "MODEL", "--arch", "sm1"), 2, "known are"),
        (("doctor", "MODEL", "--arch", "sm1"), 2, "is not one of"),
        (("probe", "MODEL", "--tp", 2, "--context", 262_145), 1, "the model ends at 262,144"),
        (("probe", "/nowhere"), 1, "does not exist"),
        (("doctor", "MODEL"), 1, "no finished artifact"),
    ],
)
def test_wrong_questions(demo: Path, args: tuple[object, ...], code: int, said: str) -> None:
    result = kiln(*(demo if a == "MODEL" else a for a in args))
    assert result.exit_code == code and said in " ".join((result.stdout + result.stderr).split())


def test_groups_that_cannot_run_yet_are_a_warning(demo: Path) -> None:
    code, lines = asked("probe", demo, "--world", 4, "--tp", 2)
    assert code == 0 and lines["plan"]["verdict"] == "warn" and "--tp 4" in lines["plan"]["do"]


def test_an_artifact_is_probed_like_a_checkpoint(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "a", world=4, tp=4)
    code, lines = asked("probe", tmp_path / "a", "--tp", 2)
    assert code == 0 and "an artifact, sealed" in lines["access"]["found"]
    assert lines["plan"]["facts"] == asked("probe", demo, "--tp", 2)[1]["plan"]["facts"]


def test_licence_and_tokenizer_are_asked_for(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    (model / "LICENSE").unlink()
    (model / "tiktoken.model").unlink()
    (model / "README.md").write_text("---\nlicense: mit\n---\n")
    code, lines = asked("probe", model, "--tp", 2)
    assert code == 0 and lines["tokenizer"]["verdict"] == lines["licence"]["verdict"] == "warn"
    assert "README.md names mit" in lines["licence"]["found"] and "must not be published" in lines["licence"]["do"]


def test_an_unknown_field_is_named(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "novelty": 1}))
    _, lines = asked("probe", model, "--tp", 2)
    assert lines["config"]["verdict"] == "warn" and "novelty" in lines["config"]["found"]


def test_package_versions() -> None:
    assert host.packages_line({"click": ("1.0", "99.0")}).verdict == "go"
    old = host.packages_line({"click": ("99.0", "99.9")})
    assert old.verdict == "warn" and "is older than 99.0" in old.found and "pip install 'click>=99.0'" in old.do
    new = host.packages_line({"click": ("1.0", "1.9")})
    assert new.verdict == "warn" and "is newer than the tested 1.9" in new.found and "'click==1.9.*'" in new.do
    missing = host.packages_line({"no-such-package": ("1.0", "1.9")})
    assert missing.verdict == "no-go" and missing.do == "pip install no-such-package"
    assert host.release("2.13.0+cpu") == (2, 13) and host.release("x") is None
    for first, last in KNOWN_GOOD.values():
        low, high = host.release(first), host.release(last)
        assert low is not None and high is not None and low <= high


def test_every_known_package_is_installed_here() -> None:
    assert None not in host.packages_line().facts["packages"].values()


def test_one_disk_has_to_hold_download_and_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000 * GB}))
    assert host.disk_line(tmp_path / "deep/er", 900 * GB, None, 0).verdict == "go"
    line = host.disk_line(tmp_path / "deep/er", 900 * GB, tmp_path / "cache", 600 * GB)
    assert line.verdict == "no-go" and "free 500.07 GB" in line.do and not (tmp_path / "deep").exists()


def test_host_memory_names_the_workers_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 3 * GB)
    line = host.memory_line(16)
    assert line.verdict == "no-go" and line.do == "use --workers 3"
    assert host.memory_line(3).verdict == "go"
    monkeypatch.setattr(host, "available_memory", lambda: GB)
    assert host.memory_line(1).do.startswith("free ")


def test_disk_speed_is_measured_on_real_bytes(tmp_path: Path) -> None:
    full, hollow = tmp_path / "full", tmp_path / "hollow"
    full.write_bytes(os.urandom(1 << 20) * 96)
    with hollow.open("wb") as f:
        f.truncate(1 << 30)
    found = disk_speed([full])
    assert found.measured and 1e6 < found.bytes_per_second < 1e12 and "MiB" in found.how
    assert not disk_speed([hollow]).measured and "holes" in disk_speed([hollow]).how
    assert not disk_speed([]).measured and "too small" in disk_speed([]).how


def test_every_architecture_has_a_card(demo: Path) -> None:
    dims = read_config(json.loads((demo / "config.json").read_text())).text
    for arch in archs().values():
        found = card.nominal(arch, None)
        assert found.memory >= 80 * GB and found.source == "nominal"
        assert card.memory_line(found, GB, dims, None).verdict == "go"
        assert kernels.layouts_line("x", arch, {"int4_tile.v1", "plain.v1"}).verdict == "go"
        assert kernels.layouts_line("x", arch, {"int4_tile.v9"}).verdict == "no-go"


@pytest.fixture(scope="module")
def sealed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sealed") / "artifact"
    converted(demo, out, world=2, tp=2)
    return out


H200 = Gpu(name="NVIDIA H200", arch="sm90", memory=150 * GB)


def examined(artifact: Path, **how: Any) -> dict[str, Line]:
    return {line.name: line for line in doctor(Patient(**({"artifact": artifact, "gpus": [H200, H200]} | how)))}


def test_doctor_on_the_right_machine(sealed: Path) -> None:
    lines = examined(sealed)
    assert go(lines.values()) and lines["gpus"].verdict == lines["mesh"].verdict == "go"
    assert lines["gpu memory"].facts["card_bytes"] == 150 * GB and "found here" in lines["gpu memory"].found
    assert "compile at the first start" in lines["kernels"].found and lines["kernels"].facts["compiles_at_start"]
    made = json.loads(kiln("plan", sealed, "--tp", 2, "--json").stdout)
    assert lines["gpu memory"].facts["weights_bytes"] == made["rank_bytes"][0] + made["common_bytes"]


@pytest.mark.parametrize(
    ("how", "name", "said"),
    [
        ({"gpus": [H200]}, "gpus", "--tp 1"),
        ({"gpus": [H200, replace(H200, arch="sm120")]}, "gpus", "one kind"),
        ({"gpus": [replace(H200, arch="sm70")] * 2}, "gpus", "use one of sm80"),
        ({"arch": "sm120"}, "gpus", "--arch sm90"),
        ({"gpu_memory": 1.0}, "gpu memory", "larger card"),
        ({"context": 300_000}, "gpu memory", "--context 262144"),
    ],
)
def test_doctor_on_the_wrong_machine(sealed: Path, how: dict[str, Any], name: str, said: str) -> None:
    lines = examined(sealed, **how)
    assert lines[name].verdict == "no-go" and said in lines[name].do


def test_doctor_without_a_gpu_only_warns(sealed: Path) -> None:
    lines = examined(sealed, gpus=[])
    assert go(lines.values()) and "--device cpu" in lines["gpus"].do and lines["gpu memory"].facts["card"] == "H200"


def with_kernels(sealed: Path, out: Path, **changes: Any) -> Path:
    artifact = copied(sealed, out)
    folder = artifact / "kernels/sm90"
    folder.mkdir(parents=True)
    index: dict[str, Any] = {
        "arch": "sm90",
        "weights": json.loads((sealed / manifest.NAME).read_text())["digest"],
        "kernels": [{"symbol": "moe_int4", "shared_bytes": 200_000}],
    }
    (folder / "index.json").write_text(json.dumps(index | changes))
    return artifact


def test_compiled_kernels_mean_that_nothing_compiles(sealed: Path, tmp_path: Path) -> None:
    lines = examined(with_kernels(sealed, tmp_path / "a"))
    assert lines["kernels"].verdict == "go" and "nothing compiles at the start" in lines["kernels"].found
    assert lines["kernels"].facts["compiles_at_start"] is False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arch": "sm120"}, "compiled for sm120"),
        ({"weights": "0"}, "another digest"),
        ({"kernels": [{"symbol": "big", "shared_bytes": 300_000}]}, "big wants 300,000 bytes of shared memory"),
        ({"kernels": [{"symbol": "big"}]}, "expected arch, weights, and kernels"),
        ({"kernels": 3}, "expected arch, weights, and kernels"),
    ],
)
def test_compiled_kernels_that_do_not_fit(sealed: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    line = examined(with_kernels(sealed, tmp_path / "a", **changes))["kernels"]
    assert line.verdict == "no-go" and said in line.found and "kernels/sm90" in line.do.replace(os.sep, "/")


def test_doctor_of_a_damaged_artifact(sealed: Path, tmp_path: Path) -> None:
    artifact = copied(sealed, tmp_path / "a")
    part = artifact / "weights/rank-01/part-01.safetensors"
    os.truncate(part, part.stat().st_size - 1)
    lines = examined(artifact)
    assert lines["files"].verdict == "no-go" and "part-01.safetensors" in lines["files"].found
    (artifact / manifest.NAME).unlink()
    lines = examined(artifact)
    assert lines["seal"].verdict == "no-go" and "no finished artifact" in lines["seal"].found


def test_probe_does_not_wait_for_torch(demo: Path, tmp_path: Path) -> None:
    """Answers in seconds also where importing torch takes many; of a draft too."""
    write_draft(tmp_path / "draft", "dflash")
    flags = ["--draft", str(tmp_path / "draft")]
    code = "import sys; from convert.cli import main; main(sys.argv[1:], standalone_mode=False)"
    code += "; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "probe", str(demo), "--tp", "2", *flags], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_probe_in_process_equals_the_command(demo: Path, tmp_path: Path) -> None:
    lines = probe(Question(model=str(demo), mesh=Mesh(world=2, tp=2), arch="sm90", out=tmp_path / "o", workers=2))
    assert [line.name for line in lines] == list(asked("probe", demo, "--tp", 2, "--out", tmp_path / "o")[1])
