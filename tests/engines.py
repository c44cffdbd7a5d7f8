"""A model small enough to run thousands of steps a minute, and what one request gives alone, by the plainest loop."""

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor

from runtime_min.kernels.moe_int4 import ref as moe
from runtime_min.kernels.moe_int4.ref import MoeShape
from runtime_min.kernels.moe_route.ref import Routing
from runtime_min.kv import batch
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_dims, random
from runtime_min.ops import REF, Ops
from runtime_min.pages import Sequence
from runtime_min.ranks import Ranks
from runtime_min.request import Request
from runtime_min.sample import Rows, Sampling, draw
from specs.dims import TextDims, Yarn
from specs.mesh import Mesh

CPU = torch.device("cpu")
DIMS = TextDims(
    hidden=64, layers=2, dense_layers=1, vocab=128, heads=2, q_lora=32, kv_lora=32, qk_nope=16, qk_rope=16, v_head=16,
    dense_ff=64, experts=4, top_k=2, moe_ff=32, shared_experts=1, routed_scale=1.5, norm_eps=1e-5, context=4096,
    rope=Yarn(
        theta=50000, factor=64, original=4096, beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=1,
    ),
)  # fmt: skip


def cached_moe() -> Ops:
    """Reference ops that unpack each expert once."""
    kept: dict[tuple[int, int], Tensor] = {}

    def dense(slots: Tensor, expert: int, size: tuple[int, int], tile: tuple[int, int], like: Tensor) -> Tensor:
        key = slots.data_ptr(), expert
        if key not in kept:
            kept[key] = moe.dequantized(slots[expert], size, tile, like)
        return kept[key]

    def moe_int4(
        x: Tensor, up: Tensor, down: Tensor, routing: Routing, first: int, shape: MoeShape, plus: Tensor, at: int
    ) -> Tensor:
        total = torch.zeros_like(x)
        for e in range(len(up)):
            token, choice = (routing.ids == first + e).nonzero(as_tuple=True)
            h = moe.silu_mul(x[token] @ dense(up, e, (2 * shape.width, shape.hidden), shape.gate_up, x).T)
            y = h @ dense(down, e, (shape.hidden, shape.width), shape.down, x).T
            total.index_add_(0, token, y * routing.weights[token, choice, None].to(y.dtype))
        total[at : at + len(plus)] += plus
        return total

    return replace(REF, moe_int4=moe_int4)


@cache
def tiny() -> Decoder:
    """The model in float64 on the CPU, its weights always the same."""
    torch.manual_seed(5)
    weights = of_dims(DIMS, Mesh(), random(CPU), torch.float64)
    how = Settings(dtype=torch.float64, device=CPU)
    # Sharper logits than random ones, so that tokens differ.
    weights["head"].tensor.mul_(6)
    return Decoder(DIMS, weights, cached_moe(), Ranks(0, Mesh()), how)


def mixed(count: int, seed: int, vocab: int) -> list[Request]:
    """Requests about as long as a page and not, greedy and sampled, some with penalties or log-probabilities."""
    r = Random(seed)
    return [
        Request(
            prompt=tuple(r.randrange(vocab) for _ in range(r.choice((1, 5, 63, 64, 65, 200)))),
            max_tokens=r.randint(1, 30),
            sampling=Sampling(
                temperature=r.choice((0.0, 1.0)), top_p=r.choice((1.0, 0.9)), seed=r.randrange(1 << 60),
                frequency=r.choice((0.0, 0.5)), logprobs=r.choice((None, 3)),
            ),
        )
        for _ in range(count)
    ]  # fmt: skip


def alone(model: Decoder, request: Request, seed: int) -> list[int]:
    """What a request gives by itself: one prompt, one cache, one token at a time, penalties counted from scratch."""
    s, cache, sequence = request.sampling, model.cache(len(request.prompt) + request.max_tokens), Sequence()
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        logits = model.forward(batch(cache, [(sequence, tokens[sequence.length :])]), cache)
        values = logits[0].tolist()
        for i in set(tokens):
            values[i] = values[i] / s.repetition if values[i] > 0 else values[i] * s.repetition
        for i, n in Counter(tokens[len(request.prompt) :]).items():
            values[i] = values[i] - s.frequency * n - s.presence
        for i, value in s.bias:
            values[i] += value
        logits = torch.tensor([values], dtype=torch.float64)
        rows = Rows(
            seeds=torch.tensor([seed]),
            positions=torch.tensor([len(tokens)]),
            knobs=torch.tensor([[s.temperature, s.top_k, s.top_p, s.min_p]], dtype=torch.float64),
            filtered=bool(s.top_k or s.top_p < 1),
        )
        tokens.append(int(draw(logits, rows) if s.temperature else logits.argmax(-1)))
        if tokens[-1] in request.stops:
            break
    return tokens[len(request.prompt) :]


def held(engine: Any) -> int:
    """Pages of the first group that somebody holds."""
    pool = engine.link.core.schedulers[0].pool
    assert pool.available == sum(n == 0 for n in pool.references) - 1
    return int(pool.pages - pool.available)
