"""The self-check finds a wrong op by name, and nothing wrong where nothing is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime_min.artifact import Artifact
from runtime_min.kernels.check import refuse_wrong, require, self_check, vision_check
from runtime_min.kernels.index import KernelError
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.ops import REF, Ops
from runtime_min.ranks import Ranks
from tests.lab import converted


@pytest.fixture(scope="module")
def artifact(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = tmp_path_factory.mktemp("check") / "artifact"
    converted(demo, out)
    return Artifact.open(out)


def model(artifact: Artifact, ops: Ops = REF) -> Decoder:
    how = Settings(dtype=torch.float32, device=torch.device("cpu"), positions=256)
    return Decoder.load(artifact, ops, Ranks(0, artifact.mesh), how)


def test_every_op_is_compared(artifact: Artifact) -> None:
    found, seconds = self_check(model(artifact))
    assert {c.op for c in found} >= {
        "add_rmsnorm", "heads_linear", "linear", "mla_decode", "mla_prefill", "moe_int4", "norm_linear", "rmsnorm",
        "rope_cache", "route", "silu_linear",
    }  # fmt: skip
    assert all(c.good and c.calls > 1 for c in found) and seconds > 0
    assert require(model(artifact)) > 0


def off_by_a_page(*args: Any) -> Tensor:
    """Attention that forgets the last token."""
    lengths = args[5]
    return REF.mla_decode(*args[:5], torch.clamp(lengths - 1, min=1), *args[6:])


def forgetful(*args: Any) -> Tensor:
    """Rotates the query and leaves the cache alone."""
    return REF.rope_cache(*args[:-1], args[-1].clone())


WRONG: dict[str, Any] = {
    "silu_linear": lambda *a: REF.silu_linear(*a) * 1.05,
    "mla_decode": off_by_a_page,
    "rope_cache": forgetful,
    "route": lambda logits, bias, k, scale: REF.route(logits, torch.zeros_like(bias) - logits, k, scale),
    "moe_int4": lambda *a: REF.moe_int4(*a[:4], a[4] + 1, *a[5:]),
    "rmsnorm": lambda x, w, eps: REF.rmsnorm(x, w, eps) * torch.nan,
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_op_is_named(artifact: Artifact, name: str) -> None:
    broken = model(artifact, replace(REF, **{name: WRONG[name]}))
    with pytest.raises(KernelError, match=f"{name}: differs from its definition"):
        require(broken)


def test_the_vision_tower_s_attention_is_compared(artifact: Artifact) -> None:
    how, dims = Settings(dtype=torch.float32, device=torch.device("cpu")), artifact.config.vision
    assert dims is not None
    refuse_wrong(vision_check(REF, dims, how))

    def one_picture(qkv: Tensor, cos: Tensor, sin: Tensor, lengths: tuple[int, ...]) -> Tensor:
        return REF.vit_attn(qkv, cos, sin, (sum(lengths),))

    def unturned(qkv: Tensor, cos: Tensor, sin: Tensor, lengths: tuple[int, ...]) -> Tensor:
        return REF.vit_attn(qkv, torch.ones_like(cos), torch.zeros_like(sin), lengths)

    for wrong in (one_picture, unturned):
        with pytest.raises(KernelError, match="vit_attn: differs from its definition"):
            refuse_wrong(vision_check(replace(REF, vit_attn=wrong), dims, how))
