"""What a layout is, and the two logical weight types that layouts store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specs.errors import InputError
from specs.storage import GROUP

WORDS_PER_GROUP = GROUP // 8


class LayoutError(InputError):
    """A weight, a cut or a stored tensor does not fit the layout."""


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """An INT4 matrix [N, K] as the checkpoint packs it.

    words [N, K/8] int32, eight consecutive inputs a word, lowest nibble first, stored as q + 8;
    scales [N, K/32] bf16. Source: compressed-tensors `pack-quantized`, group 32, symmetric.
    """

    words: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        n, words = self.words.shape
        if self.words.dtype != torch.int32 or self.scales.dtype != torch.bfloat16:
            found = f"{self.words.dtype}, {self.scales.dtype}"
            raise LayoutError(f"INT4 words and scales are int32 and bfloat16, found {found}")
        wanted = (n, words // WORDS_PER_GROUP)
        if words % WORDS_PER_GROUP or tuple(self.scales.shape) != wanted:
            raise LayoutError(f"words {[n, words]} want scales {list(wanted)}, found {list(self.scales.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.words.shape[1] * 8

    def dequantized(self) -> Tensor:
        """[N, K] float32: codes times scales, exact."""
        nibbles = self.words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32, device=self.words.device)
        codes = ((nibbles & 15) - 8).view(*self.scales.shape, GROUP)
        return (codes * self.scales[..., None].float()).view(self.shape)

    def cut(self, axis: int, low: int, high: int) -> Int4Groups:
        """Rows (axis 0) or inputs (axis 1) low..high; inputs in whole groups."""
        if axis == 0:
            return Int4Groups(self.words[low:high], self.scales[low:high])
        if low % GROUP or high % GROUP:
            raise LayoutError(f"inputs {low}..{high} do not fall on groups of {GROUP}")
        return Int4Groups(self.words[:, low // 8 : high // 8], self.scales[:, low // GROUP : high // GROUP])

    @staticmethod
    def fuse(parts: Sequence[Int4Groups]) -> Int4Groups:
        """Rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        return Int4Groups(torch.cat([p.words for p in parts]), torch.cat([p.scales for p in parts]))

    @staticmethod
    def join(parts: Sequence[Int4Groups]) -> Int4Groups:
        """Inputs of all parts side by side."""
        if len(parts) == 1:
            return parts[0]
        return Int4Groups(torch.cat([p.words for p in parts], 1), torch.cat([p.scales for p in parts], 1))


class Layout(Protocol):
    """How one two-dimensional weight lies in memory.

    Four laws, all exact, hold for every layout (tests/kernels/test_layouts.py):
    unpack(pack(w)) == w; the device load of pack(w) == unpack(pack(w)); pack(cut(w)) == narrow(pack(w), cut);
    storage(shape) == shape and dtype of pack(w).
    """

    @property
    def id(self) -> str:
        """Name and version of the map; a changed map has another id."""
        ...

    @property
    def parameters(self) -> dict[str, int]:
        """What the manifest records beside the id."""
        ...

    def granule(self, axis: int) -> int:
        """The smallest cut along an axis: cuts begin and end on multiples of it."""
        ...

    def storage(self, shape: Any) -> tuple[int, ...]:
        """Shape of the stored tensor of a logical shape."""
        ...

    def pack(self, weight: Any) -> Tensor:
        """Logical weight (Tensor or Int4Groups, as the layout says) -> stored tensor."""
        ...

    def unpack(self, stored: Tensor, shape: Any) -> Any:
        """Stored tensor -> logical weight."""
        ...

    def narrow(self, stored: Tensor, shape: Any, axis: int, low: int, high: int) -> Tensor:
        """Stored tensor of the cut low..high along axis, without unpacking."""
        ...
