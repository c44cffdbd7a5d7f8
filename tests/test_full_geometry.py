"""Two layers of the full geometry, one of them with 384 experts, at TP 8 and EP 8 on one GPU, all ranks together.

Needs 60 GB of disk or /dev/shm and 110 GB on the GPU. The oracle is transformers' decoder with the experts dequantized
in FP32 straight from the checkpoint, and the same decoder in bf16 tells which error is fair.
"""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors import safe_open
from torch import Tensor

from convert.demo.checkpoint import write_demo
from convert.demo.geometry import TINY, Geometry, k26
from runtime_min.artifact import Artifact
from runtime_min.kernels.jit import Jit
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.ops import REF, triton_ops
from runtime_min.ranks import Ranks
from runtime_min.score import score
from specs.mesh import Mesh
from tests.lab import converted
from tests.together import together

FULL = k26(2)
MESHES = [{"world": 8, "tp": 8}, {"world": 8, "tp": 8, "ep": 8}]
TOKENS = 96


def text_model(folder: Path, device: str) -> Any:
    """transformers' text model of a checkpoint, float32, experts dequantized one by one on `device`."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    stated = json.loads((folder / "config.json").read_text())["text_config"]
    stated = {k: v for k, v in stated.items() if k not in ("quantization_config", "auto_map", "model_type", "dtype")}
    config = DeepseekV3Config(**stated)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = model.to_empty(device=device).eval()
    fresh = type(model.model.rotary_emb)(config).to(device)
    model.model.rotary_emb = fresh
    weights: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    left = {n for n in weights if not n.startswith("model.rotary_emb")}
    read = Reader(folder, device)
    for name in sorted(left):
        stem, _, last = name.rpartition(".")
        if last in ("gate_up_proj", "down_proj") and stem.endswith("experts"):
            for e in range(len(weights[name])):
                parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
                fused = torch.cat([read.int4(f"language_model.{stem}.{e}.{p}") for p in parts])
                weights[name].data[e] = fused
        else:
            found = read(f"language_model.{name}")
            assert found.shape == weights[name].shape, name
            weights[name].data.copy_(found)
        left.discard(name)
    assert not left
    return model


class Reader:
    """Tensors of a checkpoint folder, in float32 on `device`."""

    def __init__(self, folder: Path, device: str) -> None:
        self.map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self.files = {f: safe_open(folder / f, "pt") for f in set(self.map.values())}
        self.device = device

    def raw(self, name: str) -> Tensor:
        tensor: Tensor = self.files[self.map[name]].get_tensor(name)
        return tensor.to(self.device)

    def __call__(self, name: str) -> Tensor:
        return self.raw(name).float()

    def int4(self, stem: str) -> Tensor:
        shape = torch.Size(self.raw(f"{stem}.weight_shape").tolist())
        codes = unpack_from_int32(self.raw(f"{stem}.weight_packed"), 4, shape)
        return codes.float() * self(f"{stem}.weight_scale").repeat_interleave(32, 1)


def ours(out: Path, ids: Tensor, device: str, dtype: torch.dtype, triton: bool) -> Tensor:
    """Logits [B, T, V] of all ranks of an artifact together, by chunks so that prefill and decode both work."""

    def work(ranks: Ranks) -> Tensor:
        artifact = Artifact.open(out, ranks.rank, verify=False)
        ops = triton_ops(Jit()) if triton else REF
        model = Decoder.load(artifact, ops, ranks, Settings(dtype=dtype, device=torch.device(device), positions=256))
        return torch.cat([score(model, ids[:1], chunk=TOKENS), score(model, ids[1:], chunk=7)])

    parts = together(Mesh(**json.loads((out / "manifest.json").read_text())["mesh"]), work)
    assert all(torch.equal(p, parts[0]) for p in parts)
    return parts[0]


def ids_for(geometry: Geometry) -> Tensor:
    return torch.randint(0, geometry.ranks, (2, TOKENS), generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_together_equal_transformers(demo: Path, tmp_path: Path, mesh: dict[str, int]) -> None:
    ids = ids_for(TINY)
    converted(demo, tmp_path / "out", **mesh)
    with torch.no_grad():
        want = text_model(demo, "cpu")(ids).logits
    assert (ours(tmp_path / "out", ids, "cpu", torch.float32, triton=False) - want).abs().max() <= 2e-4


@pytest.mark.gpu
@pytest.mark.slow
def test_full_geometry_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ids_for(FULL)
    write_demo(tmp_path / "model", FULL)
    model = text_model(tmp_path / "model", "cuda")
    with torch.no_grad():
        want = model(ids.cuda()).logits.cpu()
        model = model.to(torch.bfloat16)
        fair = error(model(ids.cuda()).logits.float().cpu(), want)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    for mesh in MESHES:
        out = tmp_path / "-".join(map(str, mesh.values()))
        converted(tmp_path / "model", out, workers=8, **mesh)
        found = error(ours(out, ids, "cuda", torch.bfloat16, triton=True), want)
        with capsys.disabled():
            print(f"\n{mesh}: relative error {found:.5f}, transformers in bf16 {fair:.5f}, logits std {want.std():.3f}")
        assert found <= 1.5 * fair
        torch.cuda.empty_cache()


def error(found: Tensor, want: Tensor) -> float:
    """Root mean square of the difference, against that of what is wanted."""
    return float((found - want).square().mean().sqrt() / want.square().mean().sqrt())
