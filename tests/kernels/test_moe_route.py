"""Routing against its definition: the same experts in the same order, also where choices are equal."""

import pytest
import torch

from runtime_min.kernels.jit import Jit
from runtime_min.kernels.moe_route import launch, ref


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 384, 8), (37, 384, 8), (9, 12, 3), (5, 1000, 6), (4, 4, 4)]
)
def test_route(device: str, tokens: int, experts: int, top_k: int) -> None:
    logits = torch.randn(tokens, experts, device=device)
    bias = torch.randn(experts, device=device)
    found, want = launch.route(Jit(), logits, bias, top_k, 2.827), ref.route(logits, bias, top_k, 2.827)
    assert torch.equal(found.ids, want.ids) and found.ids.dtype == torch.int32
    assert torch.allclose(found.weights, want.weights, rtol=2e-6, atol=0)
    order = torch.randperm(tokens, device=device)
    again = launch.route(Jit(), torch.cat([logits, logits], -1)[order][:, : logits.shape[1]], bias, top_k, 2.827)
    assert torch.equal(again.ids, found.ids[order]) and torch.equal(again.weights, found.weights[order])


def test_of_equal_choices_the_lower_id_is_taken(device: str) -> None:
    logits = torch.zeros(3, 20, device=device)
    logits[1, 11] = logits[1, 13] = 1.0
    found = launch.route(Jit(), logits, torch.zeros(20, device=device), 4, 1.0)
    assert found.ids.tolist() == [[0, 1, 2, 3], [11, 13, 0, 1], [0, 1, 2, 3]]
    assert torch.allclose(found.weights[0], torch.full((4,), 0.25, device=device))


def test_the_bias_chooses_and_does_not_weigh(device: str) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], device=device)
    found = launch.route(Jit(), logits, torch.tensor([9.0, 0.0, 0.0, 0.0], device=device), 2, 1.0)
    scores = logits.sigmoid()[0, [0, 3]]
    assert found.ids.tolist() == [[0, 3]] and torch.allclose(found.weights[0], scores / scores.sum())


def test_no_tokens_and_wrong_dtype(device: str) -> None:
    bias = torch.zeros(16, device=device)
    assert launch.route(Jit(), torch.empty(0, 16, device=device), bias, 4, 1.0).ids.shape == (0, 4)
    with pytest.raises(ValueError, match="expected rows of float32"):
        launch.route(Jit(), torch.zeros(2, 16, device=device).bfloat16(), bias, 4, 1.0)
