"""An artifact's draft as an engine wants it: found by name, read, and held against what was asked of it."""

from collections.abc import Callable

from runtime_min.kv import LatentCache
from runtime_min.request import Limits
from runtime_min.speculate.draft import Draft
from runtime_min.speculate.pace import Pace
from specs.errors import InputError

MakeDraft = Callable[[LatentCache], Draft]


class SpeculationError(InputError):
    """What was asked of drafts, and cannot be."""


def paced(draft: Draft, limits: Limits) -> Pace:
    """As the limits say, or as suits the draft; SpeculationError for more tokens in a row than it proposes."""
    tokens = limits.spec_tokens or draft.usual
    if tokens > draft.longest:
        raise SpeculationError(
            f"--spec-tokens: found {tokens}, this draft proposes at most {draft.longest} in a row; ask for no more"
        )
    return Pace(tokens=tokens, nodes=limits.spec_tree, ahead=draft.ahead, adaptive=limits.spec_adaptive)
