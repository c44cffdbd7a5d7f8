"""Before ready: what Triton's JIT would otherwise compile while serving. Compiled kernels need none of it."""

import copy

from runtime_min.drafts import Draft
from runtime_min.kernels.check import with_layers
from runtime_min.kernels.compile import grow, guess, take
from runtime_min.kernels.record import steps
from runtime_min.models.decoder import Decoder


def warm(model: Decoder, step_tokens: int, trees: bool = False) -> None:
    """Runs a layer of each kind over batches that reach every kernel of steps of up to `step_tokens` tokens; trees:
    attention of draft trees too."""
    kinds = sorted({0, min(model.dims.dense_layers, model.dims.layers - 1)})
    small = with_layers(model, kinds, model.ops)
    for step in steps(min(model.dims.context, model.cos.shape[0])):
        if sum(queries for queries, _ in step.sequences) <= step_tokens * 2 * model.ranks.groups:
            take(small, step)
    if trees:
        grow(small, small.layers[0][1].heads, model.settings)


def warm_draft(draft: Draft, step_tokens: int) -> None:
    """The same of a draft, beside a target of one layer, whose cache is small."""
    alone = copy.copy(draft)
    alone.target = with_layers(draft.target, [0], draft.ops)
    few = (s for s in steps(len(draft.target.cos)) if sum(queries for queries, _ in s.sequences) <= step_tokens * 2)
    guess(alone, few)
