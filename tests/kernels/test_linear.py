"""Products of few tokens against torch: odd sizes, splits of K, norm and silu before them, strided inputs."""

import pytest
import torch
from torch import Tensor

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.linear import launch, ref
from runtime_min.kernels.linear.launch import Config, Problem


class Fixed(Jit):
    """Kernels that always pick one config."""

    def __init__(self, config: Config) -> None:
        super().__init__(lambda problem: config)


def close(found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """fp32: order of sums. bf16: one rounding of inputs (norm, silu) and one of the result, both of 2^-8."""
    bound = 2e-5 if dtype == torch.float32 else 1.2e-2
    assert found.shape == want.shape and found.isfinite().all()
    assert (found.double() - want.double()).abs().max() <= bound * want.double().abs().max()


DTYPES = [torch.float32, torch.bfloat16]
CONFIGS = [Config(bn=16, bk=32), Config(bn=32, bk=64, split=2, warps=2), Config(bn=16, bk=32, split=3, stages=2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 16, 21])
def test_linear(device: str, dtype: torch.dtype, config: Config, tokens: int) -> None:
    n, k = 72, 200
    x = torch.randn(tokens, 2 * k, device=device, dtype=dtype)[:, k:]
    weight = torch.randn(n, k, device=device, dtype=dtype)
    found = launch.linear(Fixed(config), x, weight, torch.float32)
    close(found, ref.linear(x.float(), weight.float()), torch.float32)
    close(launch.linear(Fixed(config), x, weight), ref.linear(x.float(), weight.float()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_norm_and_silu(device: str, dtype: torch.dtype, config: Config) -> None:
    n, k, tokens = 48, 192, 5
    x = 3 * torch.randn(tokens, k, device=device, dtype=dtype)
    gamma, weight = (torch.randn(*s, device=device, dtype=dtype) for s in ((k,), (n, k)))
    found = launch.norm_linear(Fixed(config), x, gamma, 1e-5, weight)
    close(found, ref.norm_linear(x.float(), gamma.float(), 1e-5, weight.float()), dtype)
    gate_up = torch.randn(tokens, 2 * k, device=device, dtype=dtype)
    close(launch.silu_linear(Fixed(config), gate_up, weight), ref.silu_linear(gate_up.float(), weight.float()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS[:2], ids=str)
def test_heads(device: str, dtype: torch.dtype, config: Config) -> None:
    tokens, heads, k, n = 9, 3, 64, 96
    x = torch.randn(tokens, heads, k + 8, device=device, dtype=dtype)[:, :, :k]
    for across in (True, False):
        weight = torch.randn(heads, *((k, n) if across else (n, k)), device=device, dtype=dtype)
        found = launch.heads_linear(Fixed(config), x, weight, across)
        close(found, ref.heads_linear(x.float(), weight.float(), across), dtype)


def test_rows_do_not_depend_on_their_company(device: str) -> None:
    x, weight = torch.randn(16, 256, device=device), torch.randn(64, 256, device=device)
    kernels = Fixed(Config(bn=16, bk=64, split=2))
    whole = launch.linear(kernels, x, weight)
    order = torch.randperm(16, device=device)
    assert torch.equal(launch.linear(kernels, x[order], weight), whole[order])
    assert torch.equal(launch.linear(kernels, x[:9], weight), whole[:9])


def test_counters_are_zero_again(device: str) -> None:
    x, weight = torch.randn(2, 512, device=device), torch.randn(64, 512, device=device)
    kernels = Fixed(Config(bn=32, bk=64, split=4))
    first = launch.linear(kernels, x, weight)
    for _ in range(3):
        assert torch.equal(launch.linear(kernels, x, weight), first)


def test_the_library_takes_over(device: str) -> None:
    kernels = Jit()
    x, weight, gamma = (torch.randn(*s, device=device) for s in ((40, 64), (32, 64), (64,)))
    assert Problem(32, 64, 1, 64).default().torch
    assert torch.allclose(launch.linear(kernels, x, weight), x @ weight.T, atol=1e-5)
    assert launch.linear(kernels, x[:0], weight).shape == (0, 32)
    want = ref.norm_linear(x, gamma, 1e-6, weight)
    assert torch.allclose(launch.norm_linear(kernels, x, gamma, 1e-6, weight), want, atol=1e-4)


@pytest.mark.parametrize("shape", [(2112, 7168, 1), (1536, 1536, 1), (512, 128, 8), (128, 512, 8), (7168, 1024, 1)])
def test_candidates_of_the_model_are_few_and_legal(shape: tuple[int, int, int]) -> None:
    n, k, heads = shape
    for tokens in (1, 16, 64):
        found = Problem(n, k, heads, tokens).candidates()
        assert 5 < len(found) < 200 and len(set(found)) >= len(found) - 1
        assert all(c.torch or k % (c.bk * c.split) == 0 for c in found)
