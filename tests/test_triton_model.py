"""The whole small model with Triton ops: in the CPU interpreter, and in bf16 on a GPU against transformers' error."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from convert.demo.checkpoint import write_demo
from convert.demo.geometry import TINY, Geometry
from runtime_min.artifact import Artifact
from runtime_min.kernels.jit import Jit
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.ops import REF, triton_ops
from runtime_min.ranks import Ranks
from runtime_min.score import score
from tests.lab import converted
from tests.reference import dequantized, reference
from tests.test_model import OTHER, ROOT, ids_for

GEOMETRIES = {"tiny": TINY, "other": OTHER}


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Geometry]:
    """A folder with `model` and its `artifact` of world 1."""
    geometry = GEOMETRIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    write_demo(folder / "model", geometry, seed=3)
    converted(folder / "model", folder / "artifact")
    return folder, geometry


def logits(out: Path, ids: Tensor, chunk: int, device: str, dtype: torch.dtype, triton: bool) -> Tensor:
    artifact = Artifact.open(out)
    how = Settings(dtype=dtype, device=torch.device(device), positions=1024)
    model = Decoder.load(artifact, triton_ops(Jit()) if triton else REF, Ranks(0, artifact.mesh), how)
    return score(model, ids, chunk=chunk)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
@pytest.mark.parametrize("name", ["other", pytest.param("tiny", marks=pytest.mark.slow)])
def test_triton_equals_reference_in_the_interpreter(name: str, tmp_path: Path) -> None:
    """A prefill of 17 tokens and a decode of one."""
    write_demo(tmp_path / "model", GEOMETRIES[name], seed=3)
    converted(tmp_path / "model", tmp_path / "artifact")
    ids = ids_for(GEOMETRIES[name], 1, 18)
    found, want = (logits(tmp_path / "artifact", ids, 17, "cpu", torch.float32, triton) for triton in (True, False))
    assert (found - want).abs().max() <= 2e-4


def error(found: Tensor, want: Tensor) -> float:
    return float((found - want).square().mean().sqrt() / want.square().mean().sqrt())


@pytest.mark.gpu
def test_bf16_on_a_gpu_is_as_good_as_transformers(
    made: tuple[Path, Geometry], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, geometry = made
    ids = ids_for(geometry, 4, 150)
    model = reference(dequantized(folder / "model", tmp_path / "dense")).cuda()
    with torch.no_grad():
        want = model(input_ids=ids.cuda()).logits.cpu()
        fair = error(model.bfloat16()(input_ids=ids.cuda()).logits.float().cpu(), want)
    save_file({"ids": ids}, tmp_path / "in")
    command = [sys.executable, "-m", "runtime_min", "score", str(folder / "artifact"), "--device", "cuda"]
    command += ["--ops", "triton", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole = error(load_file(tmp_path / "out")["logits"], want)
    steps = error(logits(folder / "artifact", ids, 3, "cuda", torch.bfloat16, True), want)
    exact = error(logits(folder / "artifact", ids, 64, "cuda", torch.float32, True), want)
    with capsys.disabled():
        print(f"\nbf16: prefill {whole:.5f}, steps of 3 {steps:.5f}, transformers {fair:.5f}; float32 {exact:.2e}")
    assert whole <= 1.5 * fair and steps <= 1.5 * fair and exact <= 1e-4
