"""Conversion by several processes: the same bytes, the first error, and nobody left behind."""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from convert.pipeline import convert
from convert.readers.safetensors_dir import SafetensorsDir
from convert.repack import pool
from specs.errors import OutputError, SourceError
from tests.lab import converted, copied, edit, planned, tree

ROOT = Path(__file__).parent.parent
MESH = {"world": 2, "tp": 2}


@pytest.fixture(autouse=True)
def small_jobs_go_to_processes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LEAST_BYTES", 1)


class Deadly(SafetensorsDir):
    """Reading a layer's norm kills the process, as the kernel does when memory runs out."""

    def rows(self, name: str, low: int, high: int) -> torch.Tensor:
        if name.endswith("layers.1.input_layernorm.weight") and mp.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().rows(name, low, high)


class Slow(SafetensorsDir):
    """Writes down who reads, and takes a minute for it."""

    def rows(self, name: str, low: int, high: int) -> torch.Tensor:
        (self.path / f"reader-{os.getpid()}").touch()
        time.sleep(60)
        return super().rows(name, low, high)


def test_processes_write_what_threads_write(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "threads", workers=2, **MESH)
    seen: list[int] = []
    made = planned(demo, **MESH)
    assert pool.processes(list(made.jobs), 1 << 40, 8) == 2
    report = convert(made, SafetensorsDir(demo), tmp_path / "processes", 8, seen.append)
    assert tree(tmp_path / "processes") == tree(tmp_path / "threads")
    assert sum(seen) == report.bytes_read and report.core["hash"] > 0
    assert report.peak_bytes > 3 * 100e6


def test_the_error_of_a_process_is_the_error(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    name = "language_model.model.layers.1.mlp.experts.3.up_proj.weight_scale"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][0, 0] = torch.nan

    edit(model, name, damage)
    with pytest.raises(SourceError, match=r"experts.3.up_proj.weight_scale: 1 scales are negative or not finite"):
        converted(model, tmp_path / "out", workers=8, **MESH)
    assert not list((tmp_path / "out").rglob("*.part")) and not (tmp_path / "out/manifest.json").exists()


def test_a_killed_process_is_an_error_and_a_rerun_goes_on(demo: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"worker process was killed.*run the same command again"):
        convert(planned(demo, **MESH), Deadly(demo), tmp_path / "out", 8)
    assert not (tmp_path / "out/manifest.json").exists()
    converted(demo, tmp_path / "out", workers=8, **MESH)
    converted(demo, tmp_path / "direct", **MESH)
    assert tree(tmp_path / "out") == tree(tmp_path / "direct")


CHILD = """
import sys
from pathlib import Path
from convert.pipeline import convert
from convert.repack import pool
from tests.lab import planned
from tests.test_pool import Slow
if __name__ == "__main__":
    pool.LEAST_BYTES = 1
    convert(planned(sys.argv[1], world=2, tp=2), Slow(Path(sys.argv[1])), Path(sys.argv[2]), 8)
"""


def test_processes_end_with_their_parent(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    command = [sys.executable, str(script), str(model), str(tmp_path / "out")]
    parent = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    readers: list[int] = []
    for _ in range(600):
        readers = [int(p.name.split("-")[1]) for p in model.glob("reader-*")]
        if len(readers) == 2:
            break
        time.sleep(0.1)
    assert len(readers) == 2 and parent.pid not in readers
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in readers):
            return
        time.sleep(0.1)
    pytest.fail("worker processes outlived their parent")
