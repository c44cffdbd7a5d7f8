"""The bench of several ranks, over gloo at tiny sizes: what it measures, what it leaves, how many layers fit."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime_min.bench.ranks import fitting, meta, plot, table
from runtime_min.bench.steps import Card
from runtime_min.bench.together import NONE, LoadRow, StepRow, SumRow, steps, sums, ways
from runtime_min.collectives import Symmetric
from runtime_min.kernels.compile import Alone
from runtime_min.models.decoder import Decoder
from runtime_min.models.shapes import of_dims
from runtime_min.ranks import Ranks
from specs.config import read_config
from specs.mesh import Mesh
from tests.engines import CPU, tiny
from tests.fullsize import k26_config
from tests.lab import converted

ROOT = Path(__file__).parent.parent
FACTS = {"ranks": "2", "card": "none", "mesh": "w2"}


@pytest.fixture(scope="module")
def left(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of two processes leaves."""
    folder = tmp_path_factory.mktemp("bench")
    converted(demo, folder / "a", world=2, tp=2, ep=2)
    command = [sys.executable, "-m", "runtime_min.bench.ranks", "--world", "2", "--ep", "2", "--device", "cpu"]
    command += ["--config", str(demo / "config.json"), "--layers", "2", "--tokens", "1,4", "--batches", "1"]
    command += ["--context", "64", "--artifact", str(folder / "a"), "--rounds", "1", "--result", str(folder / "r")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (folder / "r.md").read_text() in done.stdout
    return folder / "r"


@pytest.mark.slow
def test_a_run_leaves_every_part(left: Path) -> None:
    found = json.loads(left.with_suffix(".json").read_text())
    facts, rows = found["facts"], found["rows"]
    assert facts["sums"] == "gloo" and facts["mesh"] == "w2-tp2-ep2" and facts["layers"] == "2"
    assert "runtime_min.bench.ranks --world 2 --ep 2" in facts["command"]
    of = {part: [r for r in rows if r["part"] == part] for part in ("sum", "step", "load")}
    assert [(r["tokens"], r["how"], r["bytes"]) for r in of["sum"]] == [(1, "gloo", 512), (4, "gloo", 2048)]
    assert [(r["sequences"], r["how"]) for r in of["step"]] == [(1, NONE), (1, "gloo")]
    assert [(r["state"], len(r["seconds"])) for r in of["load"]] == [("cold", 2), ("warm", 2)]
    assert all(r["ms"] > 0 and r["device_ms"] > 0 and r["bytes_ms"] > 0 for r in of["step"])
    assert all(r["us"] > 0 for r in of["sum"]) and all(min(r["seconds"]) > 0 and r["gb"] > 0 for r in of["load"])
    assert left.with_suffix(".svg").read_text().startswith("<?xml")


def rows() -> list[Any]:
    step = StepRow(sequences=8, context=64, how=NONE, ms=3.0, device_ms=2.5, bytes_ms=1.0)
    return [
        *(SumRow(tokens=t, bytes=t * 14336, how=h, us=10.0 * t) for t in (1, 2) for h in ("NCCL", "one-shot")),
        *(replace(step, how=how, ms=ms) for how, ms in ((NONE, 3.0), ("NCCL", 6.0), ("symmetric", 4.0))),
        LoadRow(state="cold", seconds=(2.0, 1.0), gb=8.0),
    ]


def test_tables_of_whole_and_of_cut_runs() -> None:
    text = table(rows(), FACTS)
    assert "| tokens | KiB | NCCL | one-shot |" in text and "| 2 | 28 | 20.0 | 20.0 |" in text
    assert "| none | 8 | 64 | 3.00 | 2.50 | 1.00 |  |" in text
    assert "| NCCL | 8 | 64 | 6.00 | 2.50 | 1.00 | 50.0% |" in text and "| 4.00 | 2.50 | 1.00 | 25.0% |" in text
    assert "| cold | 2.00 | 1.00 | 50.0% | 8.00 | 4.00 |" in text
    for count in range(1, len(rows()) + 1):
        table(rows()[:count], FACTS)


def test_the_drawing_is_the_same_for_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        plot(rows(), FACTS, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_as_many_layers_as_fit() -> None:
    dims, mesh = read_config(k26_config()).text, Mesh(world=8, tp=8)

    def size(layers: int) -> int:
        made = of_dims(replace(dims, layers=layers), mesh, meta, torch.bfloat16).values()
        return sum(s.tensor.nbytes for s in made) + 1000 * layers * 576 * 2

    assert fitting(dims, mesh, 1000, size(61)) == 61 and fitting(dims, mesh, 1000, size(61) - 1) == 60
    assert fitting(dims, mesh, 1000, size(7)) == 7 and fitting(dims, mesh, 1000, 0) == 2


class Counting(Alone):
    """A rank alone that counts its sums by who would add up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", "NCCL")

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        used.append("NCCL" if self.symmetric is None else f"{self.symmetric.one_shot}")
        return x


used: list[str] = []


def test_every_way_to_add_up_is_measured_and_left_out() -> None:
    shared = Symmetric(buffer=torch.zeros(16, dtype=torch.uint8), group="g", one_shot=7)
    group = Counting(0, Mesh(), symmetric=shared)
    assert list(ways(group)) == ["NCCL", "symmetric"] and list(ways(replace(group, symmetric=None))) == ["NCCL"]
    found = list(sums(group, (1, 3), 64, CPU, torch.bfloat16))
    assert [r.how for r in found] == ["NCCL", "one-shot", "two-shot"] * 2
    # One-shot whatever the size, and never.
    assert set(used) == {"NCCL", "0", str(8 << 20)}
    used.clear()
    model = tiny()

    def build(ranked: Ranks) -> Decoder:
        made = Decoder.__new__(Decoder)
        made.__dict__ = model.__dict__ | {"ranks": ranked}
        return made

    by_how = {}
    for row in steps(build, group, (1,), 64, Card(gb_s=1.0, tflops=1.0)):
        by_how[row.how] = set(used)
        used.clear()
    assert by_how == {NONE: set(), "NCCL": {"NCCL"}, "symmetric": {"7"}}
