"""Attention within pictures against its definition: ragged, packed, any size of head."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.rope_cache.ref import rotate
from runtime_min.kernels.vit_attn import launch, ref

# fp32: order of sums. bf16: rotated queries and keys, weights and the result are rounded once each.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CASES = [([40], 2, 24), ([16, 1, 33, 4], 3, 72), ([32, 32], 1, 16), ([5, 64], 2, 4), ([20], 1, 64)]


def case(device: str, dtype: torch.dtype, lengths: list[int], heads: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    qkv = torch.randn(sum(lengths), 3, heads, head, device=device).to(dtype)
    angle = torch.rand(sum(lengths), head // 2, device=device) * 6
    return qkv, angle.cos(), angle.sin()


def close(found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == want.shape and found.isfinite().all()
    assert (found.float() - want.float()).abs().max() <= BOUND[dtype] * want.float().abs().max()


@pytest.mark.parametrize("lengths", [[40], [16, 1, 33]])
def test_the_definition_is_softmax_attention_of_each_item(lengths: list[int]) -> None:
    qkv, cos, sin = (x.double() for x in case("cpu", torch.float32, lengths, 2, 24))
    q, k, v = (x.transpose(0, 1) for x in qkv.unbind(1))
    q, k = (rotate(x, cos, sin) for x in (q, k))
    parts = [x.split(lengths, 1) for x in (q, k, v)]
    want = torch.cat([scaled_dot_product_attention(*p) for p in zip(*parts, strict=True)], 1).transpose(0, 1)
    assert (ref.vit_attn(qkv, cos, sin, lengths) - want).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_vit_attn(device: str, dtype: torch.dtype, sizes: tuple[list[int], int, int]) -> None:
    qkv, cos, sin = case(device, dtype, *sizes)
    want = ref.vit_attn(qkv.clone(), cos, sin, sizes[0])
    close(launch.vit_attn(Jit(), qkv, cos, sin, sizes[0]), want, dtype)


def test_no_item_sees_another(device: str) -> None:
    """NaN in one picture stays there, and order does not matter: the same bits."""
    lengths = [20, 33]
    qkv, cos, sin = case(device, torch.float32, lengths, 2, 24)
    kernels = Jit()
    both = launch.vit_attn(kernels, qkv.clone(), cos, sin, lengths)
    swapped = [torch.cat([x[20:], x[:20]]) for x in (qkv, cos, sin)]
    other = launch.vit_attn(kernels, *swapped, [33, 20])
    assert torch.equal(torch.cat([other[33:], other[:33]]), both)
    qkv[:20] = float("nan")
    assert torch.equal(launch.vit_attn(kernels, qkv, cos, sin, lengths)[20:], both[20:])


def test_no_patches(device: str) -> None:
    qkv, cos, sin = case(device, torch.float32, [], 2, 24)
    assert launch.vit_attn(Jit(), qkv, cos, sin, []).shape == (0, 2, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[256], [4096, 4096], [4, 1024, 2691, 300]], ids=str)
def test_the_model_s_sizes(device: str, lengths: list[int]) -> None:
    """bf16 against FP32 on the same inputs."""
    qkv, cos, sin = case(device, torch.bfloat16, lengths, 16, 72)
    want = ref.vit_attn(qkv.float(), cos, sin, lengths)
    close(launch.vit_attn(Jit(), qkv, cos, sin, lengths), want, torch.bfloat16)
