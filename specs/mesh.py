"""Mesh(world, tp, ep): which rank holds which part. Integers only."""

from dataclasses import dataclass
from typing import Literal

from specs.errors import CutError

MAX_WORLD = 64
Axis = Literal["tp", "ep", "etp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """world ranks; tp of them share one copy of the dense tensors, ep groups share out the experts.

    Both axes are views of the same ranks. etp = world / ep ranks cut inside an expert. With tp < world there are
    world / tp groups that serve different requests and hold equal dense tensors.
    """

    world: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.world <= MAX_WORLD:
            problems.append(f"world {self.world}: expected 1..{MAX_WORLD}")
        else:
            legal = divisors(self.world)
            for name, value in (("tp", self.tp), ("ep", self.ep)):
                if value not in legal:
                    problems.append(f"{name} {value} does not divide world {self.world}; legal: {spell(legal)}")
        if problems:
            raise CutError(problems)

    @property
    def etp(self) -> int:
        return self.world // self.ep

    def size(self, axis: Axis) -> int:
        return {"tp": self.tp, "ep": self.ep, "etp": self.etp}[axis]

    def index(self, axis: Axis, rank: int) -> int:
        """This rank's place on the axis. Ranks of one expert group are neighbours."""
        if axis == "tp":
            return rank % self.tp
        return rank // self.etp if axis == "ep" else rank % self.etp

    def __str__(self) -> str:
        return f"w{self.world}-tp{self.tp}-ep{self.ep}"


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def spell(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"


def cut(size: int, ways: int, index: int) -> tuple[int, int]:
    """Bounds of part `index` of `ways` equal parts; the caller has checked that they are equal."""
    step = size // ways
    return index * step, (index + 1) * step
