"""Decode attention against its definition: ragged queries and lengths, splits, pages in any order, padding."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime_min.kernels.index import KernelError
from runtime_min.kernels.jit import Jit
from runtime_min.kernels.mla_decode import launch, ref
from runtime_min.kernels.mla_decode.launch import Config
from runtime_min.kv import ancestors

# fp32: order of sums. bf16: weights are rounded once, the result once.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


class Fixed(Jit):
    def __init__(self, config: Config) -> None:
        super().__init__(lambda problem: config)


def case(
    device: str,
    dtype: torch.dtype,
    queries: list[int],
    lengths: list[int],
    heads: int,
    latent: int,
    rope: int,
    page: int,
) -> dict[str, Any]:
    """Pages are given out in a random order; rows that no token owns are NaN."""
    need = [-(-n // page) for n in lengths]
    free = torch.randperm(sum(need) + 2, device=device)
    rows = torch.full(((sum(need) + 2) * page, latent + rope), torch.nan, device=device)
    pages = torch.zeros(len(lengths), max(need) + 1, dtype=torch.int32, device=device)
    taken = 0
    for b, n in enumerate(need):
        mine = free[taken : taken + n]
        taken += n
        pages[b, :n] = mine
        for p in mine.tolist():
            rows[p * page : (p + 1) * page] = torch.randn(page, latent + rope, device=device)
        if lengths[b] % page:
            rows[int(mine[-1]) * page + lengths[b] % page : (int(mine[-1]) + 1) * page] = torch.nan
    cu_q = torch.tensor([0, *queries], device=device).cumsum(0).int()
    tokens = sum(queries)
    return {
        "q_lat": torch.randn(tokens, heads, latent, device=device).to(dtype),
        "q_pe": torch.randn(tokens, heads, rope, device=device).to(dtype),
        "rows": rows.to(dtype), "pages": pages, "cu_q": cu_q,
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device), "page_tokens": page,
        "scale": (latent + rope) ** -0.5,
    }  # fmt: skip


def close(found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.isfinite().all()
    assert (found.float() - want.float()).abs().max() <= BOUND[dtype] * want.float().abs().max()


CASES = [
    ([1], [1], 8, 64, 32, 16), ([1, 1, 1], [37, 5, 130], 4, 96, 16, 16), ([3, 1, 16], [70, 9, 16], 2, 64, 16, 32),
    ([1, 0, 2, 0], [33, 0, 64, 20], 3, 64, 32, 16),
]  # fmt: skip
CONFIGS = [Config(waves=0), Config(pages=1), Config(block=32, pages=1, waves=9, stages=1)]


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_mla_decode(device: str, dtype: torch.dtype, config: Config, sizes: tuple[Any, ...]) -> None:
    inputs = case(device, dtype, *sizes)
    found = launch.mla_decode(Fixed(config), **inputs)
    close(found, ref.mla_decode(**inputs), dtype)


def grown(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same call whose query tokens are nodes of random trees."""
    device, visible, prefix = inputs["rows"].device, [], []
    for b, n in enumerate(inputs["cu_q"].diff().tolist()):
        parents = [int(torch.randint(-1, i, (1,))) if i else -1 for i in range(n)]
        visible += ancestors(parents)[0].tolist()
        prefix.append(int(inputs["lengths"][b]) - n)
    tree = (torch.tensor(prefix, dtype=torch.int32, device=device), torch.tensor(visible, device=device))
    return inputs | {"longest": 64, "tree": tree}


TREES = [
    ([64, 1, 7], [64 + 37, 5, 130], 2, 64, 16, 16), ([40, 0, 2], [40, 0, 64], 3, 96, 16, 32),
    ([5, 64], [70, 64], 5, 32, 16, 32),
]  # fmt: skip


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("sizes", TREES, ids=str)
def test_trees(device: str, dtype: torch.dtype, config: Config, sizes: tuple[Any, ...]) -> None:
    inputs = grown(case(device, dtype, *sizes))
    found = launch.mla_decode(Fixed(config), **inputs)
    want = ref.mla_decode(**inputs)
    close(found, want, dtype)
    causal = ref.mla_decode(**{k: v for k, v in inputs.items() if k != "tree"})
    assert (causal - want).abs().max() > 0.1


def test_a_chain_is_the_causal_mask(device: str) -> None:
    inputs = case(device, torch.float32, [5, 16, 1], [70, 16, 33], 2, 64, 16, 16)
    visible = [bits for n in (5, 16, 1) for bits in ancestors(range(-1, n - 1))[0].tolist()]
    tree = (torch.tensor([65, 0, 32], dtype=torch.int32, device=device), torch.tensor(visible, device=device))
    want = ref.mla_decode(**inputs)
    close(ref.mla_decode(**inputs, tree=tree), want, torch.float32)
    close(launch.mla_decode(Jit(), **inputs, tree=tree), want, torch.float32)


def test_a_node_sees_itself_and_its_ancestors_alone(device: str) -> None:
    """T64: other nodes' rows, whatever they hold, change nothing but themselves and their descendants."""
    parents = [-1, 0, 0, 1, 2, 3]
    inputs = grown(case(device, torch.float32, [6], [22], 2, 64, 16, 16))
    inputs["tree"] = (inputs["tree"][0], torch.tensor(ancestors(parents)[0], device=device))
    for op in (ref.mla_decode, partial(launch.mla_decode, Jit())):
        before = op(**inputs)
        for node in range(6):
            rows, key = inputs["rows"].clone(), 16 + node
            rows[int(inputs["pages"][0, key // 16]) * 16 + key % 16] += 1
            moved = (op(**inputs | {"rows": rows}) != before).flatten(1).any(1).tolist()
            assert moved == [bool(int(bits) >> node & 1) for bits in inputs["tree"][1]]


RINGS = [Config(block=b, pages=1, waves=w, ring=n) for b, n in launch.RINGS.items() for w in (0, 1)]
OURS = [Config(), *RINGS]


def fitting(config: Config) -> Jit:
    """Kernels with a config that this card can run."""
    if config.ring and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for sm90")
    return Fixed(config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", OURS, ids=str)
@pytest.mark.parametrize("heads", [8, 64])
def test_trees_at_the_model_s_sizes(device: str, heads: int, config: Config) -> None:
    inputs = grown(case(device, torch.bfloat16, [64, 4, 16, 1], [5000, 700, 64, 1], heads, 512, 64, 64))
    wide = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    close(launch.mla_decode(fitting(config), **inputs), ref.mla_decode(**wide), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("config", OURS, ids=str)
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_the_model_s_sizes(device: str, heads: int, config: Config) -> None:
    """bf16 against FP32 on the same inputs: the error of a product in bf16."""
    inputs = case(device, torch.bfloat16, [1, 4, 16, 1], [5000, 700, 64, 1], heads, 512, 64, 64)
    wide = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    close(launch.mla_decode(fitting(config), **inputs), ref.mla_decode(**wide), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("config", RINGS, ids=str)
def test_rows_of_the_ring_do_not_depend_on_their_company(device: str, config: Config) -> None:
    """And no run differs from another."""
    config = replace(config, waves=0)
    inputs = case(device, torch.bfloat16, [1, 1, 1], [5000, 700, 64], 8, 512, 64, 64)
    whole = launch.mla_decode(fitting(config), **inputs)
    for b in range(3):
        alone = inputs | {
            "q_lat": inputs["q_lat"][b : b + 1], "q_pe": inputs["q_pe"][b : b + 1], "pages": inputs["pages"][b : b + 1],
            "cu_q": torch.tensor([0, 1], dtype=torch.int32, device=device), "lengths": inputs["lengths"][b : b + 1],
        }  # fmt: skip
        for _ in range(20):
            assert torch.equal(launch.mla_decode(fitting(config), **alone), whole[b : b + 1])


def test_the_ring_is_offered_at_the_model_s_sizes_alone() -> None:
    sizes = {"heads": 8, "queries": 1, "sequences": 1, "latent": 512, "rope": 64, "page_tokens": 64}
    assert any(c.ring for c in launch.Problem(**sizes).candidates())
    for other in ({"page_tokens": 32}, {"latent": 256}, {"rope": 32}, {"item": 4}):
        assert not any(c.ring for c in launch.Problem(**sizes | other).candidates())


def test_a_ring_is_refused_at_other_sizes(device: str) -> None:
    inputs = case(device, torch.bfloat16, [1], [5], 2, 64, 16, 16)
    with pytest.raises(KernelError, match=r"latent=64.*ring=5.* and bf16"):
        launch.mla_decode(Fixed(Config(ring=5)), **inputs)


def test_rows_do_not_depend_on_their_company(device: str) -> None:
    """The same sequence alone, with others, and at another place, in the same number of splits: the same bits."""
    inputs = case(device, torch.float32, [1, 2, 1], [50, 33, 20], 4, 64, 16, 16)
    kernels = Fixed(Config(waves=0))
    whole = launch.mla_decode(kernels, **inputs)
    order = [2, 0, 1]
    tokens = torch.tensor([3, 0, 1, 2], device=device)
    moved = inputs | {
        "q_lat": inputs["q_lat"][tokens], "q_pe": inputs["q_pe"][tokens], "pages": inputs["pages"][order],
        "cu_q": torch.tensor([0, 1, 2, 4], dtype=torch.int32, device=device), "lengths": inputs["lengths"][order],
    }  # fmt: skip
    assert torch.equal(launch.mla_decode(kernels, **moved), whole[tokens])


def test_no_tokens(device: str) -> None:
    inputs = case(device, torch.float32, [0], [5], 2, 64, 16, 16)
    assert launch.mla_decode(Jit(), **inputs).shape == (0, 2, 64)
