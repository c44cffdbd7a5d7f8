"""Artifacts without the vision part: they say so, prove, re-shard, and refuse pictures by name."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from convert.cli import main as kiln
from runtime_min.artifact import Artifact
from runtime_min.cli import main as kiln_run
from specs import manifest
from specs.errors import ArtifactError
from tests.lab import converted, copied, edit, proven, tree
from tests.pictures import drawn, saved

CPU = torch.device("cpu")


def run(command: object, *args: object) -> Result:
    result = CliRunner().invoke(command, [str(a) for a in args])  # type: ignore[arg-type]
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def text_only(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text") / "a"
    done = run(kiln, "convert", demo, "--tp", 1, "--text-only", "--out", out)
    assert done.exit_code == 0, done.stderr
    return out


def test_the_manifest_says_so_and_the_artifact_proves(demo: Path, text_only: Path) -> None:
    sealed = manifest.read(text_only)
    assert sealed["parts"] == ["text"] and set(sealed["logical"]) == {"text"}
    assert not (text_only / "vision").exists() and "parts text\n" in run(kiln, "inspect", text_only).stdout
    assert (text_only / "config.json").read_bytes() == (demo / "config.json").read_bytes()
    verdict = proven(text_only, demo)
    assert verdict.ok, verdict.problems


def test_the_text_part_is_the_same_with_and_without(demo: Path, tmp_path: Path, text_only: Path) -> None:
    converted(demo, tmp_path / "whole")
    whole = tree(tmp_path / "whole")
    same = {n: b for n, b in tree(text_only).items() if n.startswith("weights/")}
    assert same == {n: b for n, b in whole.items() if n.startswith("weights/")}
    assert manifest.read(tmp_path / "whole")["logical"]["text"] == manifest.read(text_only)["logical"]["text"]


def test_another_mesh_of_it_is_byte_for_byte_a_conversion(demo: Path, tmp_path: Path, text_only: Path) -> None:
    for source, out in ((demo, "direct"), (text_only, "again")):
        options = ("--text-only",) if source == demo else ()
        done = run(kiln, "convert", source, "--tp", 2, *options, "--out", tmp_path / out)
        assert done.exit_code == 0, done.stderr
    direct, again = tree(tmp_path / "direct"), tree(tmp_path / "again")
    assert direct == again
    done = run(kiln, "convert", tmp_path / "again", "--tp", 1, "--text-only", "--out", tmp_path / "back")
    assert done.exit_code == 0 and tree(tmp_path / "back") == tree(text_only)


def test_a_checkpoint_without_vision_tensors_converts_text_only(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    for name in ("vision_tower.patch_embed.pos_emb.weight", "mm_projector.pre_norm.weight"):
        edit(model, name, lambda tensors: tensors.clear())
    refused = run(kiln, "plan", model, "--tp", 1)
    assert refused.exit_code == 1 and "vision_tower" in refused.stderr
    assert run(kiln, "plan", model, "--tp", 1, "--text-only").exit_code == 0


def test_pictures_are_refused_by_name(text_only: Path, tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(saved(drawn(30, 30)))
    opened = Artifact.open(text_only)
    with pytest.raises(ArtifactError, match="was made with --text-only and takes no pictures"):
        opened.vision(CPU)
    common = ("generate", text_only, "--device", "cpu", "--max-tokens", 2, "--json", "--prompt", "look")
    result = run(kiln_run, *common, "--image", tmp_path / "p.png")
    assert result.exit_code == 1 and "--text-only" in result.stderr
    assert len(json.loads(run(kiln_run, *common).stdout)["ids"]) <= 2


def test_vision_files_are_checked_when_they_are_read(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "a")
    weights = Artifact.open(tmp_path / "a").vision(CPU, torch.float32)
    assert weights["pos_emb"].shape == (8, 8, 64) and {t.dtype for t in weights.values()} == {torch.float32}
    part = tmp_path / "a/vision/part-00.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\x7f")
    opened = Artifact.open(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"vision/part-00.safetensors: sha256"):
        opened.vision(CPU)
    assert Artifact.open(tmp_path / "a", verify=False).vision(CPU)
    part.unlink()
    with pytest.raises(ArtifactError, match="not there"):
        Artifact.open(tmp_path / "a", verify=False).vision(CPU)
