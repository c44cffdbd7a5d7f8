"""What the runtime refuses, before it allocates anything, and what it samples."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from runtime_min.artifact import Artifact
from runtime_min.cli import main
from runtime_min.models.rope import frequencies, mscale, softmax_scale
from runtime_min.ranks import RanksError, check
from specs import manifest
from specs.config import read_config
from specs.errors import ArtifactError
from specs.mesh import Mesh
from tests.fullsize import k26_config
from tests.lab import converted, copied


@pytest.fixture(scope="module")
def sealed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runtime") / "artifact"
    converted(demo, out)
    return out


def run(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_all_bad_files_are_named(sealed: Path, tmp_path: Path) -> None:
    artifact = copied(sealed, tmp_path / "a")
    parts = sorted((artifact / "weights/rank-00").glob("*.safetensors"))
    for part in parts[:2]:
        data = bytearray(part.read_bytes())
        data[-3] ^= 4
        part.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(artifact)
    assert len(caught.value.problems) == 2 and all(str(p) in str(caught.value) for p in parts[:2])
    assert Artifact.open(artifact, verify=False).nbytes > 1e6
    parts[0].unlink()
    with pytest.raises(ArtifactError, match="not there"):
        Artifact.open(artifact, verify=False)


def test_a_changed_index_is_found_without_hashing_weights(sealed: Path, tmp_path: Path) -> None:
    artifact = copied(sealed, tmp_path / "a")
    index = artifact / "weights/rank-00/index.json"
    index.write_text(index.read_text().replace('"tile_k": 256', '"tile_k": 128', 1))
    with pytest.raises(ArtifactError, match=r"index.json: sha256"):
        Artifact.open(artifact, verify=False)


def test_an_unknown_layout_is_refused(sealed: Path, tmp_path: Path) -> None:
    import hashlib

    artifact = copied(sealed, tmp_path / "a")
    index = artifact / "weights/rank-00/index.json"
    index.write_text(index.read_text().replace("int4_tile.v1", "int4_tile.v9"))
    body = {
        k: v
        for k, v in json.loads((artifact / "manifest.json").read_text()).items()
        if k not in ("format", "version", "digest")
    }
    for file in body["files"]:
        if file["path"] == "weights/rank-00/index.json":
            file |= {"size": index.stat().st_size, "sha256": hashlib.sha256(index.read_bytes()).hexdigest()}
    (artifact / "manifest.json").write_bytes(manifest.sealed(body))
    with pytest.raises(ArtifactError, match=r"stored in int4_tile.v9, this version reads plain.v1, int4_tile.v1"):
        Artifact.open(artifact)


def test_wrong_worlds_and_ranks(sealed: Path) -> None:
    with pytest.raises(ArtifactError, match=r"has ranks 0..0 \(w1-tp1-ep1\), rank 3"):
        Artifact.open(sealed, 3)
    with pytest.raises(RanksError, match="4 processes run an artifact of 8 ranks"):
        check(Mesh(world=8, tp=8), 0, 4)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("generate", "/nowhere", "--ids", "1"), 1, "no finished artifact"),
        (("generate", "A", "--ids", "1,x"), 2, "expected comma-separated integers"),
        (("generate", "A", "--ids", "99999"), 1, "id 99999 is outside the vocabulary 0..767"),
        (("generate", "A"), 2, "exactly one of"),
        (("generate", "A", "--ids", "1", "--prompt", "x"), 2, "exactly one of"),
        (
            ("generate", "A", "--ids", "1", "--dtype", "float64", "--ops", "triton"),
            1,
            "float64 exists for the reference ops only",
        ),
        (("generate", "A", "--ids", "1", "--max-tokens", "300000"), 1, "exceed the context of 262144"),
        (("generate", "A", "--ids", "1", "--top-p", "0"), 2, "not in the range"),
        (("score", "A", "--input", "/nowhere", "--output", "o"), 1, "cannot be read"),
    ],
)
def test_wrong_input_and_usage(sealed: Path, args: tuple[str, ...], code: int, said: str) -> None:
    result = run(
        *(str(sealed) if a == "A" else a for a in args), *(() if args[0] != "generate" else ("--device", "cpu"))
    )
    assert result.exit_code == code and said in result.stderr


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there are GPUs here")
def test_a_gpu_that_is_not_there_is_no_silent_cpu(sealed: Path) -> None:
    result = run("generate", sealed, "--device", "cuda", "--ids", "1")
    assert result.exit_code == 1 and "1 ranks want 1 GPUs, 0 are there" in result.stderr


def test_score_takes_exactly_ids(sealed: Path, tmp_path: Path) -> None:
    save_file({"ids": torch.zeros(2, 3), "extra": torch.zeros(1)}, tmp_path / "in")
    result = run("score", sealed, "--device", "cpu", "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert result.exit_code == 1 and "expected exactly `ids` [B, T] int64" in result.stderr
    assert not (tmp_path / "out").exists()


def test_ids_work_without_a_tokenizer(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    (model / "tiktoken.model").unlink()
    converted(model, tmp_path / "out")
    facts = json.loads(
        run("generate", tmp_path / "out", "--device", "cpu", "--ids", "5,6,7", "--max-tokens", 3, "--json").stdout
    )
    assert len(facts["ids"]) == 3 and facts["text"] is None
    result = run("generate", tmp_path / "out", "--device", "cpu", "--prompt", "x")
    assert result.exit_code == 1 and "use --ids" in result.stderr


def test_yarn_numbers_of_the_release() -> None:
    dims = read_config(k26_config()).text
    f = frequencies(dims.rope, 64)
    assert f[:3].tolist() == pytest.approx([1, 0.713111085, 0.508527419], rel=1e-8)
    assert f[8:12].tolist() == pytest.approx([0.0668740305, 0.043776656, 0.0284279591, 0.0182829556], rel=1e-8)
    assert f[31].item() == pytest.approx(4.38220646e-7, rel=1e-8)
    assert mscale(64, 1) == pytest.approx(1.4158883083359672)
    assert softmax_scale(dims) == pytest.approx(0.14467962580268923, rel=1e-14)
