"""An artifact is a source: whatever way it is cut again, the bytes are those of a direct conversion."""

import json
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from convert.demo.checkpoint import write_demo
from convert.demo.geometry import Geometry
from convert.readers.artifact import ArtifactSource
from convert.repack import pool
from convert.repack.verify import verify
from convert.shard.plan import PART_BYTES, legal_values
from specs import manifest
from specs.errors import ArtifactError
from specs.mesh import Mesh, divisors
from tests.lab import converted, copied, planned, proven, tree
from tests.test_verify import flipped

WORLDS = (1, 2, 3, 4, 6, 8)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Small models of every odd shape the family allows."""
    dense = draw(st.integers(0, 1))
    experts = draw(st.sampled_from([2, 3, 4, 6, 8, 12]))
    return Geometry(
        hidden=32 * draw(st.integers(1, 5)),
        layers=dense + draw(st.integers(1, 2)),
        dense_layers=dense,
        heads=draw(st.sampled_from([1, 2, 4, 6, 8])),
        q_lora=draw(st.sampled_from([8, 24, 40])),
        kv_lora=draw(st.sampled_from([8, 16, 40])),
        qk_nope=draw(st.sampled_from([4, 12, 16])),
        qk_rope=draw(st.sampled_from([2, 8])),
        v_head=draw(st.sampled_from([4, 12, 16])),
        dense_ff=draw(st.sampled_from([24, 48, 96])),
        experts=experts,
        top_k=1,
        moe_ff=32 * draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])),
        shared_experts=draw(st.integers(1, 2)),
        ranks=draw(st.sampled_from([256, 320, 512])),
        vit_hidden=16,
        vit_heads=2,
        vit_layers=1,
        vit_ff=24,
        pos_height=2,
        pos_width=3,
    )


def legal_meshes(model: Path) -> list[Mesh]:
    """Every mesh of a few ranks that divides the model."""
    expanded = planned(model, world=1).expanded
    found = []
    for world in WORLDS:
        legal = legal_values(expanded, world)
        tps = [t for t in divisors(world) if t in legal["tp"]]
        found += [Mesh(world=world, tp=t, ep=e) for t in tps for e in legal["ep"]]
    return found


def journey(folder: Path, data: st.DataObject) -> None:
    """Convert, cut again twice, and back: at each stop the bytes of a direct conversion of the checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    model = folder / "model"
    write_demo(model, data.draw(geometries(), label="geometry"), seed=data.draw(st.integers(0, 9), label="seed"))
    meshes = legal_meshes(model)
    first, *others = (data.draw(st.sampled_from(meshes), label=f"mesh {i}") for i in range(3))
    parts = data.draw(st.sampled_from([PART_BYTES, 20_000]), label="part bytes")
    at = folder / "0"
    converted(model, at, part_bytes=parts, **asdict(first))
    for i, mesh in enumerate((*others, first), start=1):
        converted(at, folder / str(i), part_bytes=parts, **asdict(mesh))
        converted(model, folder / f"direct-{i}", part_bytes=parts, **asdict(mesh))
        at = folder / str(i)
        assert tree(at) == tree(folder / f"direct-{i}"), f"{mesh}"
    assert tree(at) == tree(folder / "0")
    assert proven(at, model).ok


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=QUIET, phases=[Phase.generate])
@given(data=st.data())
def test_there_and_back_again(tmp_path: Path, data: st.DataObject) -> None:
    journey(tmp_path / "journey", data)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET, print_blob=True)
@given(data=st.data())
def test_there_and_back_again_by_many_ways(tmp_path: Path, data: st.DataObject) -> None:
    journey(tmp_path / "journey", data)


@pytest.fixture(scope="module")
def sealed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sealed") / "artifact"
    converted(demo, out, world=4, tp=4, ep=2)
    return out


def test_processes_reshard_too(sealed: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than four workers are processes, and each opens the artifact for itself."""
    monkeypatch.setattr(pool, "LEAST_BYTES", 1)
    converted(sealed, tmp_path / "again", workers=8, world=2, tp=2)
    monkeypatch.undo()
    converted(demo, tmp_path / "direct", world=2, tp=2)
    assert tree(tmp_path / "again") == tree(tmp_path / "direct")
    source = ArtifactSource(sealed)
    assert pickle.loads(pickle.dumps(source)).header == source.header


def test_a_damaged_artifact_is_never_resharded_into_a_sealed_one(sealed: Path, demo: Path, tmp_path: Path) -> None:
    """A changed weight passes every size and header; what is read must still come to the sealed logical digest."""
    artifact = copied(sealed, tmp_path / "artifact")
    part = artifact / "weights/rank-02/part-01.safetensors"
    flipped(part, part.stat().st_size - 5000)
    assert verify(artifact, "quick").ok
    with pytest.raises(ArtifactError, match=r"text are not those it was sealed with.*kiln verify"):
        converted(artifact, tmp_path / "out", world=2, tp=2)
    assert not (tmp_path / "out" / manifest.NAME).exists()
    flipped(part, part.stat().st_size - 5000)
    assert converted(artifact, tmp_path / "out", world=2, tp=2).resumed_jobs == 0
    assert proven(tmp_path / "out", demo).ok


@pytest.mark.parametrize("name", ["config.json", "tiktoken.model", "LICENSE", "weights/rank-01/index.json"])
def test_a_changed_small_file_stops_it_at_once(sealed: Path, tmp_path: Path, name: str) -> None:
    artifact = copied(sealed, tmp_path / "artifact")
    flipped(artifact / name, 20)
    with pytest.raises(ArtifactError, match=name):
        converted(artifact, tmp_path / "out", world=2, tp=2)
    assert not (tmp_path / "out").exists()


def test_the_original_source_is_recorded_and_later_files_stay_behind(sealed: Path, demo: Path, tmp_path: Path) -> None:
    artifact = copied(sealed, tmp_path / "artifact")
    (artifact / "NOTICE.txt").write_text("added by hand")
    converted(artifact, tmp_path / "again", world=2, tp=2)
    converted(demo, tmp_path / "direct", world=2, tp=2)
    assert tree(tmp_path / "again") == tree(tmp_path / "direct")
    source: dict[str, Any] = json.loads((tmp_path / "again" / manifest.NAME).read_text())["source"]
    assert {f["name"] for f in source["files"]} == {p.name for p in demo.glob("*.safetensors")}
