"""Every change to a finished artifact is found and named."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convert.demo.checkpoint import write_demo
from convert.demo.geometry import TINY
from convert.readers.find import find
from convert.repack.compare import Sample
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
    files = sorted(p for p in artifact.rglob("*") if p.is_file())
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


def sampled(artifact: Path, count: int, seed: int = 0, against: Path | None = None) -> Verdict:
    source = None if against is None else find(str(against))
    return verify(artifact, "sample", source, workers=2, sample=Sample(count=count, seed=seed))


def test_a_sample_says_what_share_it_checked(artifact: Path, demo: Path) -> None:
    some, more, all_of_them = sampled(artifact, 1), sampled(artifact, 5), sampled(artifact, 10_000)
    assert some.ok and more.ok and some.bytes_checked < more.bytes_checked < all_of_them.bytes_checked
    assert all_of_them.bytes_checked > 0.95 * all_of_them.bytes_total
    assert sampled(artifact, 3, against=demo).ok
    assert sampled(artifact, 1).bytes_checked == some.bytes_checked


def test_a_sample_of_everything_finds_what_it_covers_and_names_it(artifact: Path) -> None:
    index = json.loads((artifact / "weights/rank-01/index.json").read_text())
    entry = next(e for e in index["tensors"] if e["name"] == "layers.1.attn.q_b")
    part = artifact / "weights/rank-01" / entry["file"]
    flipped(part, entry["offset"] + 100)
    found = sampled(artifact, 10_000).problems
    assert found == (f"{part}: tensor layers.1.attn.q_b: its sha256 is not the one in index.json",)
    outcomes = {sampled(artifact, 5, seed).ok for seed in range(20)}
    assert outcomes == {True, False}


def test_a_sample_against_a_source_compares_the_chosen_elements(artifact: Path, demo: Path, tmp_path: Path) -> None:
    model, name = (
        copied(demo, tmp_path / "model"),
        "language_model.model.layers.2.mlp.experts.3.gate_proj.weight_packed",
    )
    edit(model, name, lambda t: t[name].view(-1)[77].add_(1))
    found = sampled(artifact, 10_000, against=model).problems
    assert len(found) == 1 and f"{name}: 1 bytes differ from the source" in found[0]
    assert sampled(artifact, 2, against=model).ok or name in sampled(artifact, 2, against=model).problems[0]


def test_an_artifact_of_other_weights_differs_by_name(artifact: Path, tmp_path: Path) -> None:
    write_demo(tmp_path / "model", TINY, seed=1)
    converted(tmp_path / "model", tmp_path / "other", world=4, tp=4)
    verdict = verify(artifact, "full", find(str(tmp_path / "other")), workers=2)
    assert any("experts.7.down_proj.weight_packed" in p for p in verdict.problems) and len(verdict.problems) > 100


def kinds(artifact: Path) -> dict[str, Path]:
    """One file of every kind."""
    files = (p for p in sorted(artifact.rglob("*")) if p.is_file())
    found: dict[str, Path] = {}
    for p in files:
        where = p.relative_to(artifact).parts[:-1]
        found["/".join([*(w.split("-")[0] for w in where), p.suffix if p.suffix == ".safetensors" else p.name])] = p
    return found


def test_a_flip_in_every_kind_of_file_is_found(artifact: Path) -> None:
    """First, last and some random bytes of each: papers, provenance, side files, headers with their blanks, tensors."""
    draw = random.Random(7)
    files = kinds(artifact)
    assert {
        "manifest.json",
        "provenance.json",
        "config.json",
        "tiktoken.model",
        "LICENSE",
        "weights/rank/index.json",
        "weights/rank/.safetensors",
        "weights/common/.safetensors",
        "vision/.safetensors",
    } <= set(files)
    for file in files.values():
        size = file.stat().st_size
        places = {0, size - 1, *(draw.randrange(size) for _ in range(3))}
        if file.suffix == ".safetensors":
            header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            places |= {8, header - 1, header}
        for at in places:
            bit = draw.randrange(8)
            flipped(file, at, bit)
            assert file.name in problems(artifact), (file, at, bit)
            flipped(file, at, bit)
    assert verify(artifact).ok


def test_blanks_are_sealed_too(artifact: Path) -> None:
    """Changes that leave every JSON value as it was."""
    for name in ("manifest.json", "provenance.json"):
        path = artifact / name
        sound = path.read_bytes()
        path.write_bytes(sound.replace(b"\n ", b"\n\t", 1))
        assert f"{name}: was changed after" in problems(artifact)
        path.write_bytes(sound)
    (artifact / "provenance.json").unlink()
    assert verify(artifact).ok


def test_padding_of_an_expert_slot_is_sealed(demo: Path, tmp_path: Path) -> None:
    """Bytes that no weight uses."""
    write_demo(tmp_path / "model", replace(TINY, hidden=96, moe_ff=32))
    converted(tmp_path / "model", tmp_path / "out")
    index = json.loads((tmp_path / "out/weights/rank-00/index.json").read_text())
    entry = next(e for e in index["tensors"] if e["name"] == "layers.1.experts.down")
    part = tmp_path / "out/weights/rank-00" / entry["file"]
    last = entry["offset"] + entry["shape"][1] * 4 - 1
    assert part.read_bytes()[last] == 0
    flipped(part, last)
    assert "changed: tensor layers.1.experts.down" in problems(tmp_path / "out")


def test_a_changed_index_does_not_hide_the_damage_beside_it(artifact: Path) -> None:
    flipped(artifact / "weights/rank-00/index.json", 300)
    part = artifact / "weights/rank-01/part-01.safetensors"
    flipped(part, part.stat().st_size - 1)
    said = problems(artifact)
    assert "rank-00/index.json: sha256" in said and "rank-01/part-01.safetensors: sha256" in said


def test_folders_with_a_seal_of_their_own_are_named(artifact: Path) -> None:
    (artifact / "kernels/sm90").mkdir(parents=True)
    (artifact / "kernels/sm90/x.cubin").write_bytes(b"x")
    verdict = verify(artifact)
    assert verdict.ok and verdict.warnings == (
        f"{artifact / 'kernels'}: has a seal of its own, which this check does not cover",
    )


def test_the_card_tells_the_logical_digest(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "a", world=4, tp=4, ep=2)
    logical = json.loads((tmp_path / "a/manifest.json").read_text())["logical"]
    text = (tmp_path / "a/README.md").read_text()
    assert logical and all(f"- {part}: `{digest}`" in text for part, digest in logical.items())
    assert "| 4 | 4 | 2 |" in text and text.startswith("---\nlibrary_name: kiln\n")
