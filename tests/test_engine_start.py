"""What an engine is sure of before it takes requests: memory, kernels, agreement; and what a step costs the host."""

import random
from pathlib import Path

import pytest
import torch

from runtime_min import core as core_module
from runtime_min.artifact import Artifact
from runtime_min.core import Core
from runtime_min.engine import Engine
from runtime_min.kernels.choose import chooser
from runtime_min.kernels.compile import Alone
from runtime_min.kernels.record import Recorder
from runtime_min.kv import batch
from runtime_min.launch import facts
from runtime_min.memory import MemoryPlan
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_artifact
from runtime_min.ops import triton_ops
from runtime_min.pages import Sequence
from runtime_min.request import Limits
from runtime_min.runner import Flight, Plan, Runner
from runtime_min.warm import warm
from tests.engines import tiny
from tests.lab import converted

SMALL = Limits(running=6, step_tokens=24, share=8, cache_tokens=160, page_tokens=4)
PLAN = MemoryPlan(
    total=140 << 30, weights=74 << 30, workspace=3 << 30, graphs=1 << 30, page_bytes=1 << 20, page_tokens=4, pages=40,
    left=60 << 30,
)  # fmt: skip


def test_memory_and_readiness_are_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core_module, "measured", lambda *_: PLAN)
    Core(tiny(), SMALL)
    memory, ready = capsys.readouterr().err.splitlines()
    assert memory == (
        "memory: weights 79.46, cache 0.04, graphs 1.07, workspace 3.22, left 64.42 of 150.32 GB; 160 tokens in the "
        "cache"
    )
    assert ready == (
        "ready: 6 requests at once, 160 tokens in the cache, context 4096, no graphs, 0 kernels compiled here"
    )


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_any_mixture_launch_what_was_compiled_before_ready(demo: Path, tmp_path: Path, seed: int) -> None:
    """Kernels that `warm` reaches are all that decode, prefill, padding and scored rows together can want."""
    converted(demo, tmp_path / "a", world=2, tp=2)
    artifact, recorder = Artifact.open(tmp_path / "a"), Recorder(chooser("sm90"))
    how = Settings(dtype=torch.bfloat16, device=torch.device("meta"), positions=16384)
    shapes = of_artifact(artifact, torch.bfloat16)
    model = Decoder(artifact.config.text, shapes, triton_ops(recorder), Alone(0, artifact.mesh), how)
    warm(model, 2048)
    known, r = set(recorder.variants), random.Random(seed)
    assert len(known) > 20
    for _ in range(40):
        left, work = r.choice((1, 20, 300, 2048)), []
        cache = model.cache(1 << 20)
        for i in range(r.randint(1, 64)):
            queries = min(left, 1 if i < r.randint(0, 40) else r.randint(1, 700))
            if not queries:
                break
            sequence, past = Sequence(), r.choice((0, 1, 63, 500, 9000))
            cache.grow(sequence, past)
            sequence.length = past
            work.append((sequence, [0] * queries))
            left -= queries
        tokens = sum(len(ids) for _, ids in work)
        last = list(range(tokens)) if r.random() < 0.3 else None
        model.forward(batch(cache, work, last, padding=r.choice((0, 0, 5))), cache)
    assert set(recorder.variants) == known


def test_a_step_is_launched_before_the_one_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the host waits only while the device has the next step to do."""
    said: list[str] = []
    launch, read = Runner.launch, Flight.read

    def launched(self: Runner, plans: list[Plan]) -> Flight:
        said.append("launch")
        return launch(self, plans)

    def heard(self: Flight) -> list[list[list[float]]]:
        said.append("read")
        return read(self)

    monkeypatch.setattr(Runner, "launch", launched)
    monkeypatch.setattr(Flight, "read", heard)
    Engine.over(Core(tiny(), SMALL)).generate([[1, 2]], max_tokens=6)
    assert said == ["launch", *["launch", "read"] * 5, "read"]


def test_what_pages_held_before_changes_nothing() -> None:
    """Rows of a request that ended, even if they are not finite."""
    core = Core(tiny(), SMALL)
    one, prompts = Engine.over(core), [[i, 5, 9] for i in range(5)]
    want = [r.ids for r in one.generate(prompts, max_tokens=9)]
    core.runner.cache.rows[:, SMALL.page_tokens :] = float("nan")
    core.schedulers[0].pool.forget(list(core.schedulers[0].pool.found))
    assert [r.ids for r in one.generate(prompts, max_tokens=9)] == want


def test_ranks_state_weights_kernels_and_tuning(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "a")
    artifact, how = Artifact.open(tmp_path / "a"), Settings(dtype=torch.float32, device=torch.device("cpu"))
    assert facts(artifact, how, "ref", None) == {
        "artifact": artifact.manifest["digest"], "kernels": "NoneType", "tuning": "none", "ops": "ref",
        "dtype": "torch.float32", "inner epsilon": "1e-06", "torch": torch.__version__,
    }  # fmt: skip
