"""Every change to a finished artifact is found and named."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from convert.readers.find import find
from convert.repack.verify import Verdict, verify
from specs import manifest
from specs.errors import ArtifactError
from tests.lab import converted, copied, edit, tree


@pytest.fixture(scope="module")
def sealed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sealed") / "artifact"
    converted(demo, out, world=2, tp=2)
    return out


@pytest.fixture
def artifact(sealed: Path, tmp_path: Path) -> Path:
    return copied(sealed, tmp_path / "artifact")


def flipped(file: Path, at: int, bit: int = 0) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1 << bit]))


def problems(folder: Path) -> str:
    """What verify says of a damaged folder, whether it refuses it at once or lists problems."""
    try:
        verdict: Verdict = verify(folder, "full", workers=2)
    except ArtifactError as e:
        return str(e)
    assert not verdict.ok
    return "\n".join(verdict.problems)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_single_byte_change_is_found_and_its_file_named(artifact: Path, count: int) -> None:
    files = sorted(p for p in artifact.rglob("*") if p.is_file() and p.name != "provenance.json")
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        file = files[int(torch.randint(len(files), (1,), generator=generator))]
        at = int(torch.randint(file.stat().st_size, (1,), generator=generator))
        bit = int(torch.randint(8, (1,), generator=generator))
        flipped(file, at, bit)
        assert file.name in problems(artifact), (file, at, bit)
        flipped(file, at, bit)
    assert verify(artifact).ok


def test_the_changed_tensor_and_expert_are_named(artifact: Path) -> None:
    index = json.loads((artifact / "weights/rank-01/index.json").read_text())
    entry = next(e for e in index["tensors"] if e["name"] == "layers.2.experts.down")
    slot = entry["shape"][1] * 4
    flipped(artifact / "weights/rank-01" / entry["file"], entry["offset"] + 5 * slot + 17)
    said = problems(artifact)
    assert "rank-01/part-02.safetensors: sha256" in said and "tensor layers.2.experts.down" in said


def test_missing_short_and_strange_files(artifact: Path) -> None:
    (artifact / "weights/rank-00/part-01.safetensors").unlink()
    part = artifact / "weights/rank-01/part-01.safetensors"
    part.write_bytes(part.read_bytes()[:-7])
    (artifact / "weights/rank-00/part-99.safetensors").write_bytes(b"x")
    verdict = verify(artifact, "quick")
    assert [p for p in verdict.problems if "rank-00/part-01.safetensors: not there" in p]
    assert [p for p in verdict.problems if "rank-01/part-01.safetensors:" in p and "expected" in p]
    assert [w for w in verdict.warnings if "part-99.safetensors: is not part of this artifact" in w]


def test_an_unsealed_foreign_or_newer_artifact_is_refused(artifact: Path, tmp_path: Path) -> None:
    path = artifact / "manifest.json"
    body = json.loads(path.read_text())
    for change, said in (
        ({"version": "2.0"}, "format version '2.0', this kiln reads 1.x"),
        ({"format": "x"}, "is not a kiln-artifact"),
        ({"mesh": [1]}, "mesh: found list"),
        ({"logical": {"text": "0"}}, "was changed after sealing"),
    ):
        path.write_text(json.dumps({**body, **change}))
        with pytest.raises(ArtifactError, match=said):
            find(str(artifact))
    path.write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read"):
        verify(artifact)
    path.unlink()
    with pytest.raises(ArtifactError, match="no finished artifact"):
        verify(artifact)


def test_a_later_minor_version_is_read(artifact: Path) -> None:
    path = artifact / "manifest.json"
    body = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("format", "digest")}
    path.write_bytes(manifest.sealed({**body, "version": "1.7", "novelty": True}))
    assert verify(artifact).ok


def test_a_resealed_lie_is_found_by_unpacking(artifact: Path) -> None:
    """Hashes can be made to fit changed bytes; the logical digest then gives them away."""
    import hashlib

    part = artifact / "weights/common/part-01.safetensors"
    flipped(part, part.stat().st_size - 1)
    path = artifact / "manifest.json"
    body = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("format", "version", "digest")}
    for file in body["files"]:
        if file["path"] == "weights/common/part-01.safetensors":
            file["sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
    path.write_bytes(manifest.sealed(body))
    assert "logical digest of text" in problems(artifact)


def test_differences_from_another_source_are_named(artifact: Path, demo: Path, tmp_path: Path) -> None:
    model, name = (
        copied(demo, tmp_path / "model"),
        "language_model.model.layers.2.mlp.experts.3.gate_proj.weight_packed",
    )
    edit(model, name, lambda t: t[name].view(-1)[77].add_(1))
    verdict = verify(artifact, "full", find(str(model)), workers=2)
    assert len(verdict.problems) == 1
    assert f"{name}: 1 bytes differ from the source, the first at byte 308 of I32 [256, 32]" in verdict.problems[0]


def test_two_artifacts_are_compared_too(artifact: Path, demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "other", world=4, tp=4, ep=4)
    assert verify(artifact, "full", find(str(tmp_path / "other")), workers=2).ok


def test_an_artifact_works_wherever_it_lies(artifact: Path, tmp_path: Path) -> None:
    shutil.move(artifact, tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere").ok
    for name, data in tree(tmp_path / "elsewhere").items():
        assert str(tmp_path).encode() not in data, name


def test_part_headers_name_mesh_rank_and_layouts(artifact: Path) -> None:
    from safetensors import safe_open

    with safe_open(artifact / "weights/rank-01/part-01.safetensors", "pt") as f:
        assert f.metadata() == {
            "format": "pt",
            "kiln.format": "1.0",
            "kiln.mesh": "w2-tp2-ep1",
            "kiln.layouts": "int4_tile.v1,plain.v1",
            "kiln.rank": "1",
        }
