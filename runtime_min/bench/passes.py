"""Verify steps of a target and passes of its drafts on the clock, and what they must bring.

Where there is no card the same code times the same calls on the host, so that it runs in tests.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from runtime_min.bench.steps import Card, appended, each_ms, once, timed_ops
from runtime_min.drafts import DFlash, Draft
from runtime_min.kernels.record import Step
from runtime_min.kv import Batch, LatentCache, room
from runtime_min.models.decoder import Decoder

# Tokens that a round commits, over which the draft is extended.
EXTENDED = 4
# Nodes of a level of a tree, and levels that a draft goes through for a tree of as many as an int64 has bits.
LEVEL, LEVELS = 8, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """A step of one request's `tokens` query tokens, a chain or the nodes of a tree: milliseconds of its graph, and of
    all calls of decode attention and of the experts in graphs of their own, beside their limits."""

    tokens: int
    tree: bool
    context: int
    ms: float
    mla_ms: float
    mla_limit_ms: float
    moe_ms: float
    moe_limit_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """A draft of one request, its head and the choice of tokens included: milliseconds of extending it over EXTENDED
    committed tokens, of one further step (a whole block of DFlash), and of a level of a tree (0 for DFlash)."""

    kind: str
    context: int
    extend_ms: float
    step_ms: float
    level_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenRow:
    """A round of `drafted` tokens: its milliseconds, and the mean accept length (the target's own token included) at
    which it is as fast as plain decoding."""

    kind: str
    drafted: int
    tree: bool
    context: int
    ms: float
    accept_length: float


Row = VerifyRow | DraftRow | EvenRow


def verified(model: Decoder, tokens: int, tree: bool, context: int, card: Card) -> VerifyRow:
    cache = model.cache(room([context]))
    cache.rows[:, cache.page_tokens :].normal_()
    step = appended(cache, Step(((tokens, context),), tree=tree))
    ms = timed(model, lambda: model.forward(step, cache))
    found = timed_ops(model, step, cache, card, ("mla_decode", "moe_int4"))
    parts = {op: (t, limit) for op, _, t, limit in found}
    mla, moe = parts["mla_decode"], parts.get("moe_int4", (0.0, 0.0))
    return VerifyRow(
        tokens=tokens, tree=tree, context=context, ms=ms, mla_ms=mla[0], mla_limit_ms=mla[1], moe_ms=moe[0],
        moe_limit_ms=moe[1],
    )  # fmt: skip


def timed(model: Decoder, pass_: Callable[[], object]) -> float:
    """Milliseconds of a pass from a graph, where there is a card."""
    device = model.settings.device
    with torch.inference_mode():
        return each_ms(device, once(device, pass_))


def passes(draft: Draft, context: int) -> dict[str, Callable[[], object]]:
    """extend, step and, of EAGLE3, level: a draft's passes over a past that is made up."""
    target = draft.target
    d, how = draft.dims, target.settings
    cache = LatentCache(1, room([context + d.block]), target.dims.kv_a, how.dtype, how.device)
    rows = draft.cache(cache)
    rows.rows[:, rows.page_tokens :].normal_()

    def over(tokens: int, tree: bool = False) -> Batch:
        fresh = LatentCache(1, room([context + d.block]), 1, how.dtype, how.device)
        return appended(fresh, Step(((tokens, context),), tree=tree))

    def states(tokens: int, width: int) -> torch.Tensor:
        return torch.randn(tokens, width, dtype=how.dtype, device=how.device)

    extended, before = over(EXTENDED), states(EXTENDED, d.states)
    if isinstance(draft, DFlash):
        block = over(d.block)
        return {
            "extend": lambda: draft.context(before, extended, rows),
            "step": lambda: draft.block_logits(target.embedded(block.ids), block, rows).argmax(-1),
        }
    one, level = over(1), over(LEVEL, tree=True)
    state, several = states(1, d.hidden), states(LEVEL, d.hidden)

    def extend() -> object:
        out = draft.first(target.embedded(extended.ids), before, extended, rows)[1]
        return draft.logits(out[-1:]).argmax(-1)

    return {
        "extend": extend,
        "step": lambda: draft.logits(draft.next(target.embedded(one.ids), state, one, rows)[1]).argmax(-1),
        "level": lambda: draft.logits(draft.next(target.embedded(level.ids), several, level, rows)[1]).topk(LEVEL),
    }


def drafted(kind: str, draft: Draft, context: int) -> DraftRow:
    ms = {name: timed(draft.target, pass_) for name, pass_ in passes(draft, context).items()}
    return DraftRow(
        kind=kind, context=context, extend_ms=ms["extend"], step_ms=ms["step"], level_ms=ms.get("level", 0.0)
    )  # fmt: skip


def evens(rows: Sequence[Row], block: int) -> Iterator[EvenRow]:
    """Break-even of every draft at every verify step that it can fill; block: DFlash's."""
    verify = [r for r in rows if isinstance(r, VerifyRow)]
    for d in (r for r in rows if isinstance(r, DraftRow)):
        here = [v for v in verify if v.context == d.context]
        plain = next(v.ms for v in here if v.tokens == 1)
        for v in here:
            if v.tokens == 1 or (d.kind == "dflash" and not v.tree and v.tokens != block):
                continue
            if d.kind == "dflash":
                ms = d.extend_ms + d.step_ms
            else:
                ms = d.extend_ms + (LEVELS * d.level_ms if v.tree else (v.tokens - 2) * d.step_ms)
            yield EvenRow(
                kind=d.kind, drafted=v.tokens - 1, tree=v.tree, context=d.context, ms=ms + v.ms,
                accept_length=(ms + v.ms) / plain,
            )  # fmt: skip
