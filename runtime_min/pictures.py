"""Picture embeddings and the tokens of a prompt that they stand for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specs.errors import InputError


class PromptError(InputError):
    """Token ids, lengths or pictures that this model cannot take."""


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """positions [m] int64, ascending, on the CPU: which tokens. features [m, hidden] on the device: their rows."""

    positions: Tensor
    features: Tensor

    def within(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """For the tokens start..stop: (which of them, their features), as `Decoder.forward` takes it; None if none."""
        low, high = torch.searchsorted(self.positions, torch.tensor([start, stop])).tolist()
        if low == high:
            return None
        return (self.positions[low:high] - start).to(self.features.device), self.features[low:high]


def placed(ids: Sequence[int], pad: int | None, features: Tensor | None) -> Pictures | None:
    """`features` at the ids that are `pad`, in order; None if there are neither.

    Raises PromptError with both numbers if there are not as many of one as of the other.
    """
    found = (torch.tensor(ids) == pad).nonzero().flatten() if pad is not None else torch.empty(0, dtype=torch.int64)
    rows = 0 if features is None else len(features)
    if len(found) != rows:
        raise PromptError(f"ids: {len(found)} picture tokens (id {pad}), the pictures make {rows}")
    return None if features is None or not rows else Pictures(found, features)
