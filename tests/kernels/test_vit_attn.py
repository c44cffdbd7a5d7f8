"""Attention within pictures against its definition: ragged, packed, any size of head."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.rope_cache.ref import rotate
from runtime_min.kernels.vit_attn import launch, ref
from runtime_min.kernels.vit_attn.launch import Config, Problem

OWN = {
    f"{bm}x{bn} {ahead=} {tma=}": Config(False, bm, bn, 4, 2, ahead, tma, 0)
    for bm, bn in ((16, 16), (32, 16))
    for ahead, tma in ((False, False), (False, True), (True, False), (True, True))
}
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


class Fixed(Jit):
    def __init__(self, config: Config) -> None:
        super().__init__(lambda problem: config)


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_by_the_library(device: str, dtype: torch.dtype, sizes: tuple[list[int], int, int]) -> None:
    qkv, cos, sin = case(device, dtype, *sizes)
    want = ref.vit_attn(qkv.clone(), cos, sin, sizes[0])
    close(launch.vit_attn(Fixed(Config(torch=True)), qkv, cos, sin, sizes[0]), want, dtype)


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("sizes", CASES, ids=str)
@pytest.mark.parametrize("config", OWN)
def test_by_the_kernel(device: str, dtype: torch.dtype, sizes: tuple[list[int], int, int], config: str) -> None:
    qkv, cos, sin = case(device, dtype, *sizes)
    want = ref.vit_attn(qkv.clone(), cos, sin, sizes[0])
    close(launch.vit_attn(Fixed(OWN[config]), qkv, cos, sin, sizes[0]), want, dtype)


@pytest.mark.parametrize("config", list(OWN)[:4])
@pytest.mark.parametrize("scale", [4.0, 8.0, -8.0])
def test_scores_far_beyond_the_first_block_s(device: str, config: str, scale: float) -> None:
    """Weights measured from there would be infinite, in some rows of a tile; scores this large are coarser."""
    qkv, cos, sin = case(device, torch.float32, [40, 24], 2, 24)
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    qkv[:20, 0] = qkv[:20, 0].abs() * scale
    qkv[16:, 1] = qkv[16:, 1].abs() * 8
    want = ref.vit_attn(qkv.clone(), cos, sin, [40, 24])
    found = launch.vit_attn(Fixed(OWN[config]), qkv, cos, sin, [40, 24])
    assert found.isfinite().all() and (found - want).abs().max() <= 1e-3 * want.abs().max()


@pytest.mark.parametrize("config", [Config(torch=True), *list(OWN.values())[:4]], ids=str)
def test_no_item_sees_another(device: str, config: Config) -> None:
    """NaN in one picture stays there, and order does not matter: the same bits."""
    lengths = [20, 33]
    qkv, cos, sin = case(device, torch.float32, lengths, 2, 24)
    kernels = Fixed(config)
    both = launch.vit_attn(kernels, qkv.clone(), cos, sin, lengths)
    swapped = [torch.cat([x[20:], x[:20]]) for x in (qkv, cos, sin)]
    other = launch.vit_attn(kernels, *swapped, [33, 20])
    assert torch.equal(torch.cat([other[33:], other[:33]]), both)
    qkv[:20] = float("nan")
    found = launch.vit_attn(kernels, qkv, cos, sin, lengths)
    assert torch.equal(found[20:], both[20:]) and found[:20].isnan().all()


def test_no_patches(device: str) -> None:
    qkv, cos, sin = case(device, torch.float32, [], 2, 24)
    assert launch.vit_attn(Jit(), qkv, cos, sin, []).shape == (0, 2, 24)


def test_items_are_padded_and_their_tiles_cover_every_query_of_long_items_first() -> None:
    places, tiles = launch.places_tiles((5, 40, 16), 16, 8, torch.device("cpu"))
    whole = [*range(5), *[-1] * 11, *range(5, 45), *[-1] * 8, *range(45, 61)]
    assert places.tolist() == whole
    assert tiles.tolist() == [[16, 5, 40, 0], [16, 5, 40, 16], [16, 5, 40, 32], [64, 45, 16, 0], [0, 0, 5, 0]]


def test_a_problem_is_known_by_its_longest_item() -> None:
    qkv = torch.empty(1300, 3, 16, 72, dtype=torch.bfloat16, device="meta")
    assert launch.problem(qkv, [4, 1025, 271]) == Problem(heads=16, head=72, longest=2048)
    assert launch.problem(qkv, [4]).longest == 256 and launch.problem(qkv, [40000]).longest == 32768
    assert launch.problem(qkv.float(), [4]).candidates() == [Config(torch=True)]
    assert launch.problem(qkv.float(), [4]).default() == Config(torch=True)


def chosen() -> list[Config]:
    return Problem(heads=16, head=72, longest=4096).candidates()


SIZES = [([256], c) for c in chosen()] + [([4096, 4096], c) for c in chosen()]
SIZES += [([4, 1024, 2691, 300], c) for c in chosen()]


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "config"), SIZES, ids=str)
def test_the_model_s_sizes(device: str, lengths: list[int], config: Config) -> None:
    """bf16 against FP32 on the same inputs."""
    qkv, cos, sin = case(device, torch.bfloat16, lengths, 16, 72)
    want = ref.vit_attn(qkv.float(), cos, sin, lengths)
    close(launch.vit_attn(Fixed(config), qkv, cos, sin, lengths), want, torch.bfloat16)
