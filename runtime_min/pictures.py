"""Picture embeddings and the tokens of a prompt that they stand for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime_min.request import Media
from runtime_min.vision.items import Item, digest, prepared
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


def places(ids: Sequence[int], pad: int | None, rows: int) -> list[int]:
    """Where the ids are `pad`; PromptError with both numbers unless that is `rows` times."""
    found = [i for i, token in enumerate(ids) if token == pad]
    if len(found) != rows:
        raise PromptError(f"ids: {len(found)} picture tokens (id {pad}), the pictures make {rows}")
    return found


def placed(ids: Sequence[int], pad: int | None, features: Tensor | None) -> Pictures | None:
    """`features` at the ids that are `pad`, in order; None if there are neither."""
    found = places(ids, pad, 0 if features is None else len(features))
    return Pictures(torch.tensor(found), features) if features is not None and found else None


def media(ids: Sequence[int], pad: int | None, items: Sequence[Item], patch: int) -> tuple[Media, ...]:
    """The pictures of a prompt as a request carries them, decoded and cut into patches here.

    Raises PromptError if they are not what the ids have places for, MediaError for one that cannot be decoded.
    """
    found, out = places(ids, pad, sum(item.tokens for item in items)), []
    for item, made in zip(items, prepared(items, patch), strict=True):
        position, found = found[0], found[item.tokens :]
        out.append(Media(position=position, tokens=item.tokens, digest=digest(made), item=made))
    return tuple(out)
