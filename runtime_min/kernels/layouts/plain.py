"""plain.v1: the tensor as it is, row-major. Any number of axes, any dtype."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plain:
    """stored[i, j, ...] = logical[i, j, ...]."""

    id: Literal["plain.v1"] = field(default="plain.v1", init=False)

    @property
    def parameters(self) -> dict[str, int]:
        return {}

    def granule(self, axis: int) -> int:
        return 1

    def storage(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def pack(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def unpack(self, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        return stored.view(shape)

    def narrow(self, stored: Tensor, shape: tuple[int, ...], axis: int, low: int, high: int) -> Tensor:
        return stored.view(shape).narrow(axis, low, high - low).contiguous()
