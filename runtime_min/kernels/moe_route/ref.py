"""Choice and weights of the routed experts, by definition."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """ids [T, K] int32: experts of each token, best first. weights [T, K] of the logits' dtype."""

    ids: Tensor
    weights: Tensor


def route(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> Routing:
    """logits [T, E], bias [E], both float32 (or float64): sigmoid scores; the bias helps to choose and nothing else.

    The chosen scores are divided by their sum plus 1e-20 and multiplied by `scale`. Equal choices go to the lower id.
    """
    scores = logits.sigmoid()
    order = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(1, order)
    return Routing(order.int(), chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale)
