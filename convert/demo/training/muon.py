"""Muon for matrices, AdamW for everything else; one learning-rate factor for both.

Muon: momentum, then the nearest orthogonal matrix by five Newton-Schulz steps, so that every direction learns alike.
Source: Jordan et al., 2024, with the published coefficients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrices of x [n, O, I], singular values 0.7 to 1.2; in bf16 on a GPU."""
    a, b, c = NEWTON_SCHULZ
    y = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    near: Tensor = y.mT if tall else y
    return near.to(x.dtype)


@dataclass(slots=True)
class Optimizer:
    """Both optimizers over named weights. matrices: names for Muon; decay is of those, and bounds their singular
    values at 1 / decay. alike: names by the shape of their matrices, which are made orthogonal together."""

    params: Mapping[str, Tensor]
    matrices: frozenset[str]
    rate: float = 0.02
    adam_rate: float = 3e-3
    momentum: float = 0.95
    decay: float = 0.1
    moving: dict[str, Tensor] = field(default_factory=dict)
    alike: dict[tuple[int, ...], list[str]] = field(default_factory=dict)
    adam: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        others = [p for n, p in self.params.items() if n not in self.matrices]
        self.moving = {n: torch.zeros_like(self.params[n], requires_grad=False) for n in sorted(self.matrices)}
        for name in self.moving:
            self.alike.setdefault(tuple(self.params[name].shape[-2:]), []).append(name)
        self.adam = torch.optim.AdamW(others, lr=self.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at `factor` times the peak rates; forgets the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()
        for names in self.alike.values():
            self._step_alike([self.params[n] for n in names], [self.moving[n] for n in names], factor)
        for weight in self.params.values():
            weight.grad = None

    def _step_alike(self, weights: list[Tensor], moving: list[Tensor], factor: float) -> None:
        """One step of weights whose matrices have one shape."""
        grads = [w.grad for w in weights if w.grad is not None]
        assert len(grads) == len(weights)
        rows, columns = weights[0].shape[-2:]
        ahead = []
        for mean, grad in zip(moving, grads, strict=True):
            mean.lerp_(grad, 1 - self.momentum)
            ahead.append(grad.lerp(mean, self.momentum).view(-1, rows, columns))
        directions = torch.split(orthogonal(torch.cat(ahead)), [len(a) for a in ahead])
        size = self.rate * factor * max(1.0, rows / columns) ** 0.5
        for weight, direction in zip(weights, directions, strict=True):
            weight.mul_(1 - self.rate * factor * self.decay).sub_(direction.view_as(weight), alpha=size)

    def state(self) -> dict[str, Any]:
        return {"moving": self.moving, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for name, tensor in state["moving"].items():
            self.moving[name].copy_(tensor)


def rate_factor(step: int, steps: int, warm: int, flat: float = 0.4) -> float:
    """Share of the peak rate at `step`: a linear rise over `warm` steps, flat, then a linear fall to zero."""
    rising = min(1.0, (step + 1) / max(1, warm))
    falling = min(1.0, (steps - step) / max(1.0, (1 - flat) * steps))
    return min(rising, falling)
