"""Routed experts against their definition: every regime, every tile size, experts elsewhere, empty experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import Tensor

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.layouts import Int4Groups, Int4Tile
from runtime_min.kernels.moe_int4 import launch, ref
from runtime_min.kernels.moe_int4.launch import Config, Problem, Tile
from runtime_min.kernels.moe_int4.ref import MoeShape
from runtime_min.kernels.moe_route.ref import Routing

# Relative to the largest result. fp32: order of sums. bf16: h is rounded once, the result once; wide also the weights.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


class Fixed(Jit):
    def __init__(self, config: Config) -> None:
        super().__init__(lambda problem: config)


def slots(experts: int, n: int, k: int, device: str) -> tuple[Tensor, tuple[int, int]]:
    form = Int4Tile.for_shape(n, k)
    packed = []
    for _ in range(experts):
        codes = torch.randint(-8, 8, (n, k), dtype=torch.int8)
        packed.append(form.pack(Int4Groups(pack_to_int32(codes, 4), (torch.rand(n, k // 32) / 50 + 0.01).bfloat16())))
    return torch.stack(packed).to(device), (form.tile_n, form.tile_k)


def case(
    device: str, dtype: torch.dtype, hidden: int, width: int, here: int, first: int, total: int, tokens: int, top_k: int
) -> dict[str, Any]:  # fmt: skip
    gate_up, tile_up = slots(here, 2 * width, hidden, device)
    down, tile_down = slots(here, hidden, width, device)
    ids = torch.stack([torch.randperm(total)[:top_k] for _ in range(tokens)]) if tokens else torch.empty(0, top_k)
    return {
        "x": torch.randn(tokens, hidden + 8, device=device).to(dtype)[:, 8:], "gate_up": gate_up, "down": down,
        "routing": Routing(ids.int().to(device), torch.rand(tokens, top_k, device=device)), "first": first,
        "shape": MoeShape(hidden=hidden, width=width, gate_up=tile_up, down=tile_down),
        "plus": torch.randn(tokens // 2, hidden, device=device).to(dtype), "at": tokens // 3,
    }  # fmt: skip


def close(found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.isfinite().all()
    assert (found.float() - want.float()).abs().max() <= BOUND[dtype] * want.float().abs().max()


DIRECT = Config(direct=True, bm=8, wide=False, gate_up=Tile(bn=32), down=Tile(bn=32))
TABLE = replace(DIRECT, direct=False, bm=16)
WIDE = replace(DIRECT, direct=False, wide=True)
# Tiles of 32, 64, 128 and 256 inputs; the last has the loads that the release uses.
SMALL, MIDDLE, LARGE = (96, 32, 3, 2, 9), (128, 64, 3, 0, 3), (256, 256, 2, 1, 4)
CASES = [(SMALL, DIRECT), (SMALL, TABLE), (SMALL, WIDE), (MIDDLE, TABLE), (LARGE, TABLE)]


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize(("sizes", "config"), CASES, ids=str)
def test_moe_int4(device: str, dtype: torch.dtype, sizes: tuple[int, ...], config: Config) -> None:
    tokens = 2 if sizes == LARGE else 5
    inputs = case(device, dtype, *sizes, tokens=tokens, top_k=min(3, sizes[4]))
    found = launch.moe_int4(Fixed(config), **inputs)
    close(found, ref.moe_int4(**inputs), dtype)


def test_parts_of_k_add_up(device: str) -> None:
    inputs = case(device, torch.float32, 512, 32, 2, 0, 2, tokens=1, top_k=2)
    split = replace(DIRECT, gate_up=Tile(bn=64, split=2))
    close(launch.moe_int4(Fixed(split), **inputs), ref.moe_int4(**inputs), torch.float32)


@pytest.mark.parametrize(("dtype", "config"), [(torch.float32, DIRECT), (torch.bfloat16, WIDE)], ids=str)
def test_a_walk_over_rows(device: str, dtype: torch.dtype, config: Config) -> None:
    inputs = case(device, dtype, 256, 256, 2, 0, 3, tokens=1, top_k=2)
    found = launch.moe_int4(Fixed(replace(config, down=Tile(bn=128, walk=2), gate_up=Tile(bn=128))), **inputs)
    close(found, ref.moe_int4(**inputs), dtype)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_the_defaults(device: str, tokens: int) -> None:
    inputs = case(device, torch.float32, 128, 32, 4, 0, 6, tokens=tokens, top_k=2)
    close(launch.moe_int4(Jit(), **inputs), ref.moe_int4(**inputs), torch.float32)


def test_everybody_to_one_expert_nobody_here_and_no_tokens(device: str) -> None:
    inputs = case(device, torch.float32, 64, 32, 4, 4, 12, tokens=21, top_k=2)
    for chosen in ((6, 7), (0, 11)):
        ids = torch.tensor(chosen, dtype=torch.int32, device=device).expand(21, 2).contiguous()
        inputs["routing"] = Routing(ids, inputs["routing"].weights)
        for config in (DIRECT, TABLE):
            close(launch.moe_int4(Fixed(config), **inputs) + 1, ref.moe_int4(**inputs) + 1, torch.float32)
    none = case(device, torch.float32, 256, 64, 4, 4, 12, tokens=0, top_k=2)
    assert launch.moe_int4(Jit(), **none).shape == (0, 256)


@pytest.mark.parametrize("config", [DIRECT, TABLE])
def test_rows_do_not_depend_on_their_company(device: str, config: Config) -> None:
    inputs = case(device, torch.float32, 64, 32, 4, 0, 4, tokens=9, top_k=2)
    inputs |= {"plus": torch.randn(9, 64, device=device), "at": 0}
    whole = launch.moe_int4(Fixed(config), **inputs)
    order = torch.randperm(9, device=device)
    routing = Routing(inputs["routing"].ids[order].contiguous(), inputs["routing"].weights[order].contiguous())
    moved = inputs | {"x": inputs["x"][order], "routing": routing, "plus": inputs["plus"][order]}
    assert torch.equal(launch.moe_int4(Fixed(config), **moved), whole[order])


@pytest.mark.parametrize(("width", "here"), [(256, 384), (2048, 48)])
def test_candidates_of_the_model_are_legal(width: int, here: int) -> None:
    for tokens in (1, 8, 64, 1024, 8192):
        found = Problem(7168, width, here, 8, tokens, (256, 256), (256, 256)).candidates()
        assert 3 < len(set(found)) < 160
        assert all(28 % c.gate_up.split == 0 and 256 % c.gate_up.bn == 0 for c in found)
        assert all(7168 % (c.down.bn * c.down.walk) == 0 for c in found)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "bound"), [(1, 0.005), (4, 0.005), (33, 0.005), (256, 0.005), (1024, 0.006)])
@pytest.mark.parametrize(("width", "here"), [(256, 48), (2048, 12)])
def test_error_at_the_model_s_sizes(device: str, tokens: int, bound: float, width: int, here: int) -> None:
    """Root mean square of the error in bf16 against FP32 weights without rounding."""
    inputs = case(device, torch.bfloat16, 7168, width, here, 0, here, tokens=tokens, top_k=8)
    found = launch.moe_int4(Jit(), **inputs).float()
    want = ref.moe_int4(**(inputs | {"x": inputs["x"].float(), "plus": inputs["plus"].float()}))
    assert (found - want).square().mean().sqrt() <= bound * want.square().mean().sqrt()
