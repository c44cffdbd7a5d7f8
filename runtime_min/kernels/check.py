"""The self-check: every op that a model uses, at its own sizes and with its own weights, against its definition."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime_min.kernels.index import KernelError
from runtime_min.kernels.moe_route.ref import Routing
from runtime_min.kernels.record import Step
from runtime_min.kv import batch, room
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.ops import REF, Ops, each
from runtime_min.pages import Sequence
from specs.dims import VisionDims

# Largest difference against the largest wanted value: bf16 rounds inputs, weights and results once each; a table of
# wrong lengths, a missed mask or a swapped nibble is far above.
BOUNDS = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
# Experts that the check of moe_int4 sends its tokens to: the definition unpacks each of them on the host.
EXPERTS = 8
STEPS = (
    Step(((1, 70), (1, 3))), Step(((3, 20), (1, 1))), Step(((24, 24), (20, 90))), Step(((20, 90), (3, 3)), tree=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One op: how often it was compared, its worst error relative to what was wanted, and what is allowed."""

    op: str
    calls: int
    error: float
    bound: float

    @property
    def good(self) -> bool:
        return self.error <= self.bound


def self_check(model: Decoder) -> tuple[list[Checked], float]:
    """Every op of the first layer of each kind, in decode, verify and prefill; and the seconds it took."""
    begin = time.perf_counter()
    worst: dict[str, tuple[int, float]] = {}
    kinds = {0, min(model.dims.dense_layers, model.dims.layers - 1)}
    small = with_layers(model, sorted(kinds), _comparing(model.ops, worst))
    for wish in STEPS:
        sizes = wish.sequences
        cache = small.cache(room(cached for _, cached in sizes))
        past, work = [], []
        generator = torch.Generator().manual_seed(len(sizes))
        for queries, cached in sizes:
            ids = torch.randint(0, model.dims.vocab, (cached,), generator=generator).tolist()
            sequence = Sequence()
            past += [(sequence, ids[: cached - queries])] if cached > queries else []
            work.append((sequence, ids[cached - queries :]))
        if past:
            small.forward(batch(cache, past), cache)
        small.forward(batch(cache, work, parents=wish.parents), cache)
    bound = BOUNDS[model.settings.dtype]
    found = [Checked(op=op, calls=n, error=e, bound=bound) for op, (n, e) in sorted(worst.items())]
    return found, time.perf_counter() - begin


def require(model: Decoder) -> float:
    """Seconds of a self-check that found nothing; KernelError that names every wrong op."""
    found, seconds = self_check(model)
    refuse_wrong(found)
    return seconds


def vision_check(ops: Ops, dims: VisionDims, settings: Settings) -> list[Checked]:
    """The vision tower's attention at its own heads, over pictures of three sizes, against its definition."""
    lengths, head = (70, 4, 260), dims.vit_hidden // dims.vit_heads
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(sum(lengths), 3, dims.vit_heads, head, generator=generator).to(settings.device, settings.dtype)
    angles = torch.rand(sum(lengths), head // 2, generator=generator).to(settings.device) * 6
    want = REF.vit_attn(qkv.clone(), angles.cos(), angles.sin(), lengths)
    error = _error(ops.vit_attn(qkv, angles.cos(), angles.sin(), lengths), want)
    return [Checked(op="vit_attn", calls=1, error=error, bound=BOUNDS[settings.dtype])]


def refuse_wrong(found: list[Checked]) -> None:
    """KernelError that names every op which differs from its definition."""
    wrong = [c for c in found if not c.good]
    if wrong:
        raise KernelError(
            f"{c.op}: differs from its definition by {c.error:.2g} of the largest value, allowed is {c.bound:.2g}; do "
            "not serve from this machine, and report the card and driver"
            for c in wrong
        )


def with_layers(model: Decoder, layers: list[int], ops: Ops) -> Decoder:
    """The same weights with only these layers, run by `ops`."""
    small = copy.copy(model)
    small.dims, small.ops = replace(model.dims, layers=len(layers)), ops
    small.layers = [_rewired(model.layers[i], place, small) for place, i in enumerate(layers)]
    return small


def _rewired(layer: tuple[Any, ...], place: int, model: Decoder) -> Any:
    norm, attention, ffn_norm, ffn = layer
    return norm, _copy(attention, layer=place, model=model), ffn_norm, _copy_ffn(ffn, model.ops)


def _copy(module: Any, **changes: Any) -> Any:
    out = copy.copy(module)
    for name, value in changes.items():
        setattr(out, name, value)
    return out


def _copy_ffn(ffn: Any, ops: Ops) -> Any:
    shared = {"shared": _copy(ffn.shared, ops=ops)} if hasattr(ffn, "shared") else {}
    return _copy(ffn, ops=ops, **shared)


def _comparing(ops: Ops, worst: dict[str, tuple[int, float]]) -> Ops:
    """Ops that do what `ops` do and compare each call with the definition."""

    def watched(name: str) -> Callable[..., Any]:
        op, definition = getattr(ops, name), getattr(REF, name)

        def call(*args: Any) -> Any:
            args = few_experts(args) if name == "moe_int4" else args
            before = [a.clone() if isinstance(a, Tensor) and name == "rope_cache" else a for a in args]
            found = op(*args)
            want = definition(*before)
            pairs = list(zip(_tensors(found), _tensors(want), strict=True))
            if name == "rope_cache":
                pairs.append((args[-1], before[-1]))
            calls, error = worst.get(name, (0, 0.0))
            worst[name] = (calls + 1, max([error, *(_error(f, w) for f, w in pairs)]))
            return found

        return call

    return each(ops, watched)


def few_experts(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tokens routed to the first experts that are here."""
    x, gate_up, down, routing, first, *rest = args
    ids = first + routing.ids % min(EXPERTS, len(gate_up))
    return x, gate_up, down, Routing(ids.int().contiguous(), routing.weights), first, *rest


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Routing):
        yield value.ids.float()
        yield value.weights
    elif isinstance(value, tuple):
        yield from value
    else:
        yield value


def difference(found: Any, want: Any) -> float:
    """Root mean square of found - want, relative to that of want, the worst over their tensors."""
    errors = []
    for f, w in zip(_tensors(found), _tensors(want), strict=True):
        scale = float(w.double().square().mean().sqrt()) or 1.0
        error = float((f.double() - w.double()).square().mean().sqrt()) / scale
        errors.append(error if error == error else float("inf"))
    return max(errors)


def _error(found: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest wanted value; infinite if anything is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    scale = float(want.float().abs().max()) or 1.0
    return float((found.float() - want.float()).abs().max()) / scale
