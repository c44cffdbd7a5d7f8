"""Calls of every op as a model of given sizes makes them, with real inputs: what is tuned and benched."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime_min.kernels.compile import Alone, work
from runtime_min.kernels.launch import Problem
from runtime_min.kernels.moe_route.ref import Routing
from runtime_min.kernels.record import Recorder, Step
from runtime_min.kernels.vit_attn import launch as vit_attn
from runtime_min.kv import batch, room
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.shapes import of_dims, random
from runtime_min.ops import REF, Ops, each, triton_ops
from specs.dims import TextDims, VisionDims
from specs.mesh import Mesh

# Bytes between two uses of the same input, so that it comes from memory and not from the GPU's cache.
APART = 192 << 20
LARGE = 64 << 20
MOST_COPIES = 32
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
VERIFIED = (1, 4, 16, 64)
QUERIES = (2, 4, 8, 16)
# (sequences, nodes) of draft trees beyond that.
GROWN = ((1, 32), (4, 32), (1, 64), (4, 64))
# Longest first: a problem that does not depend on tokens is known by its first call.
PREFILLS = (8192, 4096, 2048, 1024, 512)
CONTEXT = 8192
CACHED = 64 * CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of the op `op` (a field of Ops) whose config is looked up by `problem`."""

    op: str
    problem: Problem
    args: tuple[Any, ...]


def steps() -> Iterator[Step]:
    """Decode, verify and prefill at the sizes that matter."""
    for count in COUNTS:
        yield Step(((1, min(CONTEXT, CACHED // count)),) * count)
    for count in VERIFIED:
        for queries in QUERIES:
            yield Step(((queries, CONTEXT),) * count)
    for count, nodes in GROWN:
        yield Step(((nodes, CONTEXT),) * count, tree=True)
    for tokens in PREFILLS:
        yield Step(((tokens, tokens),))


def cases(dims: TextDims, mesh: Mesh, which: Sequence[Step], device: torch.device) -> list[Case]:
    """The first call of every problem of one rank's model with random weights, in `which` steps.

    One dense and one expert layer stand for all. Ops are carried out by their definitions, but for the experts, whose
    result is left at zero: unpacking hundreds of them is slow, and no other op's speed depends on it.
    """
    small = replace(dims, layers=2, dense_layers=1)
    weights = of_dims(small, mesh, random(device), torch.bfloat16)
    found: dict[Problem, Case] = {}
    how = Settings(dtype=torch.bfloat16, device=device, positions=max(c for s in which for _, c in s.sequences))
    model = Decoder(small, weights, _watched(found), Alone(0, mesh), how)
    for step in which:
        _take(model, step)
    return list(found.values())


def vision_cases(dims: VisionDims, device: torch.device) -> list[Case]:
    """Attention of one picture of every length that a config is chosen by."""
    found = []
    heads, head = dims.vit_heads, dims.vit_hidden // dims.vit_heads
    for length in vit_attn.LENGTHS:
        qkv = torch.randn(length, 3, heads, head, device=device).bfloat16()
        angle = torch.rand(length, head // 2, device=device) * 6
        args = (qkv, angle.cos(), angle.sin(), (length,))
        found.append(Case(op="vit_attn", problem=vit_attn.problem(qkv, (length,)), args=args))
    return found


def _take(model: Decoder, step: Step) -> None:
    """One step of random tokens over a past of random latents: routing and scores as uneven as chance makes them."""
    cache = model.cache(room(cached for _, cached in step.sequences))
    cache.rows.normal_()
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(
            0, model.dims.vocab // model.ranks.mesh.tp, (count,), generator=generator
        ).tolist()
        return found

    model.forward(batch(cache, work(cache, step, ids), parents=step.parents), cache)


def _watched(found: dict[Problem, Case]) -> Ops:
    """Definitions that remember calls whose problem is new."""

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            recorder = Recorder(lambda problem: problem.default())
            shaped = getattr(triton_ops(recorder), name)(*args)
            for problem in recorder.problems:
                found.setdefault(problem, Case(op=name, problem=problem, args=args))
            return shaped.zero_() if name == "moe_int4" else _filled(shaped, getattr(REF, name)(*args))

        return call

    return each(REF, watched)


def _filled(shaped: Any, values: Any) -> Any:
    """The op's own results, strides and all, with the definition's values."""
    if isinstance(shaped, Routing):
        return Routing(shaped.ids.copy_(values.ids), shaped.weights.copy_(values.weights))
    if isinstance(shaped, tuple):
        return tuple(s.copy_(v) for s, v in zip(shaped, values, strict=True))
    return shaped.copy_(values)


def rotated(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The same call on several copies of its inputs, so many that none is still in the GPU's cache when its turn comes
    again. Inputs too large for the cache are shared; routing goes to other experts in every copy."""
    small = sum(nbytes(a) for a in args if nbytes(a) < LARGE)
    experts = max((int(a.ids.max()) + 1 for a in args if isinstance(a, Routing)), default=0)
    copies = MOST_COPIES if experts else max(1, min(MOST_COPIES, APART // max(1, small)))
    return [args, *(tuple(_copied(a, i, experts) for a in args) for i in range(1, copies))]


def nbytes(value: Any) -> int:
    """Bytes of one argument."""
    if isinstance(value, Routing):
        return nbytes(value.ids) + nbytes(value.weights)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _copied(value: Any, number: int, experts: int) -> Any:
    if isinstance(value, Routing):
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(number))
        return Routing(order.to(value.ids.device)[value.ids.long()].int(), value.weights)
    if isinstance(value, Tensor) and nbytes(value) < LARGE:
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return out.copy_(value)
    return value
