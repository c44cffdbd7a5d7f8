"""Decode attention against its definition: ragged queries and lengths, splits, pages in any order, padding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.mla_decode import launch, ref
from runtime_min.kernels.mla_decode.launch import Config

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


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_the_model_s_sizes(device: str, heads: int) -> None:
    """bf16 against FP32 on the same inputs: the error of a product in bf16."""
    inputs = case(device, torch.bfloat16, [1, 4, 16, 1], [5000, 700, 64, 1], heads, 512, 64, 64)
    wide = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    close(launch.mla_decode(Jit(), **inputs), ref.mla_decode(**wide), torch.bfloat16)


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
