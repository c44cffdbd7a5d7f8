"""Prefill attention against its definition: ragged, with a cached prefix, and in several chunks of a long context."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.mla_prefill import launch, ref
from runtime_min.kernels.mla_prefill.launch import Config
from tests.kernels.test_mla_decode import Fixed, case

# fp32: order of sums. bf16: keys, values, weights and the result are rounded once each.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def prefill_case(
    device: str, dtype: torch.dtype, queries: list[int], lengths: list[int], heads: int, nope: int, value: int
) -> dict[str, Any]:
    latent, rope, page = 64, 16, 16
    inputs = case(device, dtype, queries, lengths, heads, latent, rope, page)
    tokens = len(inputs.pop("q_lat"))
    wide = torch.randn(tokens, heads, nope, device=device).to(dtype)
    return inputs | {
        "q_nope": wide,
        "w_uk": torch.randn(heads, nope, latent, device=device).to(dtype) / 8,
        "w_uv": torch.randn(heads, value, latent, device=device).to(dtype) / 8,
    }


def close(found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.isfinite().all()
    assert (found.float() - want.float()).abs().max() <= BOUND[dtype] * want.float().abs().max()


CASES = [([40], [40], 2, 32, 32), ([33, 1, 20], [33, 50, 71], 3, 48, 40), ([0, 17], [12, 17], 1, 32, 48)]


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("room", [launch.WORKSPACE, 1])
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_mla_prefill(
    device: str, dtype: torch.dtype, room: int, sizes: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """room 1: every page is a chunk of its own."""
    monkeypatch.setattr(launch, "WORKSPACE", room)
    inputs = prefill_case(device, dtype, *sizes)
    found = launch.mla_prefill(Fixed(Config(bm=16, bn=16, warps=4)), **inputs)
    close(found, ref.mla_prefill(**inputs), dtype)
    bounds = (inputs["cu_q"].tolist(), inputs["lengths"].tolist())
    again = launch.mla_prefill(Fixed(Config(bm=32, bn=32, warps=4)), **inputs, bounds=bounds)
    close(again, ref.mla_prefill(**inputs), dtype)


def test_the_workspace_is_bounded() -> None:
    heads, nope, value = 64, 128, 128
    room = launch.WORKSPACE // (heads * (nope + value) * 2) // 64 * 64
    assert room >= 64 and room * heads * (nope + value) * 2 <= 256 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64])
def test_the_model_s_sizes(device: str, heads: int) -> None:
    """bf16 with expanded keys against FP32 on the same inputs."""
    inputs = case(device, torch.bfloat16, [700, 300], [700, 3000], heads, 512, 64, 64)
    tokens = len(inputs.pop("q_lat"))
    inputs |= {
        "q_nope": torch.randn(tokens, heads, 128, device=device).bfloat16(),
        "w_uk": torch.randn(heads, 128, 512, device=device).bfloat16() / 23,
        "w_uv": torch.randn(heads, 128, 512, device=device).bfloat16() / 23,
    }
    wide = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    close(launch.mla_prefill(Jit(), **inputs), ref.mla_prefill(**wide), torch.bfloat16)
