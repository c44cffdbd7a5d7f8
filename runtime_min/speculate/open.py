"""An artifact's draft as an engine wants it: found by name, read, and held against what was asked of it."""

import sys

from runtime_min.artifact import Artifact
from runtime_min.drafts import open_draft
from runtime_min.models.decoder import Decoder
from runtime_min.request import Limits
from runtime_min.speculate.draft import Draft
from runtime_min.speculate.models import draft_of
from runtime_min.speculate.pace import Pace
from specs.errors import InputError


class SpeculationError(InputError):
    """What was asked of drafts, and cannot be."""


def opened(artifact: Artifact, name: str, target: Decoder) -> Draft:
    """The draft of this name; rank 0 says what it is and what it takes from where. ArtifactError if there is none of
    this name, or it is not of this target."""
    found = open_draft(artifact, name, target)
    if target.ranks.rank == 0:
        sys.stderr.write("".join(f"{line}\n" for line in found.lines))
    return draft_of(found.draft, target)


def paced(draft: Draft, limits: Limits) -> Pace:
    """As the limits say, or as suits the draft; SpeculationError for more tokens in a row than it proposes."""
    tokens = limits.spec_tokens or draft.usual
    if tokens > draft.longest:
        raise SpeculationError(
            f"--spec-tokens: found {tokens}, this draft proposes at most {draft.longest} in a row; ask for no more"
        )
    return Pace(tokens=tokens, nodes=limits.spec_tree, ahead=draft.ahead, adaptive=limits.spec_adaptive)
