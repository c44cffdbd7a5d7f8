"""Serving from compiled kernels on a GPU, in a process that has neither Triton nor a compiler nor a place to write."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import converted, copied
from tests.test_compile import altered, compiled

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent
SCRIPT = """
import sys
sys.modules["triton"] = None
from runtime_min.cli import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def artifact(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cubins")
    converted(demo, folder / "artifact")
    compiled(folder / "artifact", "sm90", folder / "cache")
    return folder / "artifact"


def bare(*args: object, read_only: bool = True) -> subprocess.CompletedProcess[str]:
    """kiln-run without Triton, with an empty PATH, and on a read-only file system."""
    keep = ("LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
    env = {k: v for k, v in os.environ.items() if k in keep} | {"PATH": "/nowhere", "HOME": "/nowhere"}
    env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}"
    command = [sys.executable, "-B", "-c", SCRIPT, *map(str, args)]
    if read_only:
        places = "awk '$2 !~ \"^/(proc|sys|dev)\" {print $2}' /proc/mounts"
        mounts = f"{places} | while read m; do mount -o remount,bind,ro $m 2>/dev/null; done; "
        test = "if touch /tmp/w 2>/dev/null; then echo writable >&2; exit 99; fi; "
        path = os.environ["PATH"]
        inner = f'PATH={path}; {mounts}{test}PATH=/nowhere; exec "$@"'
        command = [str(shutil.which("unshare")), "-m", str(shutil.which("sh")), "-c", inner, "sh", *command]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def can_remount() -> bool:
    return shutil.which("unshare") is not None and bare("--help").returncode == 0


def test_a_moved_artifact_serves_without_triton(artifact: Path, tmp_path: Path) -> None:
    moved = copied(artifact, tmp_path / "moved")
    common = ("--device", "cuda", "--ids", "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20", "--json")
    done = bare("generate", moved, *common, "--max-tokens", 12, read_only=can_remount())
    assert done.returncode == 0, done.stderr[-2000:]
    assert "self-check: every kernel agrees" in done.stderr
    shutil.rmtree(moved / "kernels")
    command = [sys.executable, "-m", "runtime_min", "generate", str(moved), *common, "--max-tokens", "12"]
    compiling = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "Triton compiles at first use" in compiling.stderr
    assert json.loads(done.stdout)["ids"] == json.loads(compiling.stdout)["ids"]


def test_the_launcher_is_the_cubins_and_nothing_compiles(artifact: Path) -> None:
    done = bare("doctor", artifact, "--device", "cuda", "--json", read_only=False)
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout)
    assert facts["ok"] and facts["launcher"] == "cubins" and facts["compiled"] == 0 and facts["seconds"] < 10


def test_without_triton_and_without_cubins_nothing_runs(artifact: Path, tmp_path: Path) -> None:
    other = copied(artifact, tmp_path / "a")
    shutil.rmtree(other / "kernels")
    assert bare("generate", other, "--device", "cuda", "--ids", "1", read_only=False).returncode != 0


def test_a_missing_config_is_named(artifact: Path, tmp_path: Path) -> None:
    def drop(body: dict[str, list[dict[str, str]]]) -> None:
        body["kernels"] = [k for k in body["kernels"] if k["kernel"] != "rope_cache.rows"]

    other = altered(artifact, tmp_path / "a", drop)
    done = bare("generate", other, "--device", "cuda", "--ids", "1,2", read_only=False)
    assert done.returncode == 1 and "has no rope_cache.rows for" in done.stderr
    assert "kiln-run compile" in done.stderr
