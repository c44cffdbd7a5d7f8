"""Routing: one program a token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from runtime_min.kernels.launch import WIDEST, Kernels, Launch, power
from runtime_min.kernels.moe_route.ref import Routing


@dataclass(frozen=True, slots=True)
class Config:
    warps: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """A choice of top_k from `experts`."""

    op: ClassVar[str] = "moe_route"
    experts: int
    top_k: int

    def default(self, shared: int = WIDEST) -> Config:
        return Config(warps=1 if self.experts <= 512 else 4)

    def candidates(self) -> list[Config]:
        return [Config(warps) for warps in (1, 2, 4)]


def route(kernels: Kernels, logits: Tensor, bias: Tensor, top_k: int, scale: float) -> Routing:
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            raise ValueError(f"route: {logits.dtype} logits with strides {logits.stride()}, expected rows of float32")
        config = kernels.pick(Problem(experts, top_k))
        constants = {"E": experts, "ROW": logits.stride(0), "BLOCK": power(experts), "TOP_K": top_k}
        args = (logits, bias, ids, weights, scale)
        kernels.run(
            Launch(kernel="moe_route.choose", grid=(tokens, 1, 1), args=args, constants=constants, warps=config.warps)
        )
    return Routing(ids, weights)
