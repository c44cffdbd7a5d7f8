"""Rotary positions and the cache write against their definition; padding tokens write nowhere."""

import pytest
import torch

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.rope_cache import launch, ref

# fp32: one fused multiply-add more or less. bf16: the result may round to the other neighbour.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize(("heads", "rope", "latent"), [(8, 64, 512), (3, 16, 96), (1, 32, 64)])
def test_rope_cache(device: str, dtype: torch.dtype, heads: int, rope: int, latent: int) -> None:
    tokens, count = 6, 40
    # Views, as they come out of fused projections.
    q = torch.randn(tokens, heads, 24 + rope, device=device).to(dtype)[:, :, 24:]
    fused = torch.randn(tokens, latent + rope, device=device).to(dtype)
    angle = torch.rand(50, rope // 2, device=device) * 6
    positions = torch.tensor([3, 49, 0, 7, 7, 12], device=device)
    slots = torch.tensor([5, -1, 39, 0, 17, -1], device=device)
    caches = [torch.full((count, latent + rope), 7.0, device=device).to(dtype) for _ in range(2)]
    gamma = torch.randn(latent, device=device).to(dtype)
    common = (q, fused[:, latent:], fused[:, :latent], gamma, 1e-6, angle.cos(), angle.sin(), positions, slots)
    found, want = launch.rope_cache(Jit(), *common, caches[0]), ref.rope_cache(*common, caches[1])
    for a, b in ((found, want), (caches[0], caches[1])):
        assert a.dtype == dtype and ((a - b).abs() <= BOUND[dtype] * b.abs() + 2e-6).all()
    untouched = [i for i in range(count) if i not in (5, 39, 0, 17)]
    assert (caches[0][untouched] == 7).all()


def test_no_tokens(device: str) -> None:
    q, k, latent = (torch.empty(*s, device=device) for s in ((0, 2, 16), (0, 16), (0, 64)))
    none = torch.empty(0, dtype=torch.int64, device=device)
    table, cache = torch.ones(4, 8, device=device), torch.ones(8, 80, device=device)
    gamma = torch.ones(64, device=device)
    assert launch.rope_cache(Jit(), q, k, latent, gamma, 1e-6, table, table, none, none, cache).shape == (0, 2, 16)
    assert (cache == 1).all()
