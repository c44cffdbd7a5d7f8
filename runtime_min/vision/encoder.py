"""From patches of items to rows of the text embedding, shared out over the ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt, prod

import torch
from torch import Tensor

from runtime_min.artifact import Artifact
from runtime_min.kernels.check import refuse_wrong, vision_check
from runtime_min.models.decoder import Settings
from runtime_min.models.vit import Grid, Tower, VisionError
from runtime_min.ops import Ops
from runtime_min.ranks import Ranks
from runtime_min.vision.items import Patched, normalized
from runtime_min.vision.rule import Rule
from specs.dims import VisionDims

# Patches in one pass: enough to fill a card.
PASS = 1 << 15


def cost(grid: Grid, dims: VisionDims) -> int:
    """Arithmetic of one item, up to a factor: dense products by patches, attention by their square."""
    n = prod(grid)
    return n * (2 * dims.vit_hidden + dims.vit_ff + n)


def shares(costs: Sequence[int], world: int) -> list[list[int]]:
    """Items of every rank: the dearest first, each to whoever has least. The same on every rank."""
    out: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = load.index(min(load))
        out[rank].append(i)
        load[rank] += costs[i]
    return out


def passes(grids: Sequence[Grid], mine: Sequence[int]) -> Iterator[list[int]]:
    """`mine` in passes of at most PASS patches (a larger item is one of its own), equal grids side by side."""
    group: list[int] = []
    for i in sorted(mine, key=lambda i: (grids[i], i)):
        if group and sum(prod(grids[j]) for j in group) + prod(grids[i]) > PASS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """One rank's encoder. Every rank calls it with the same items and gets the same rows."""

    tower: Tower
    rule: Rule
    ranks: Ranks

    @classmethod
    def load(cls, artifact: Artifact, ops: Ops, ranks: Ranks, settings: Settings) -> "Encoder":
        """The encoder of one rank of an artifact.

        Raises ArtifactError if it has no vision part, MediaError if it has no preprocessor's rule, KernelError if a
        kernel differs from its definition here.
        """
        weights = artifact.vision(settings.device, settings.dtype)
        assert artifact.config.vision is not None
        if ops.kernels is not None:
            refuse_wrong(vision_check(ops, artifact.config.vision, settings))
        return cls(Tower(artifact.config.vision, weights, ops), Rule.open(artifact.path), ranks)

    def __call__(self, items: Sequence[Patched]) -> Tensor:
        """Embeddings [tokens of all items, hidden] in order. VisionError if a grid and its patches disagree."""
        grids = [item.grid for item in items]
        plan = shares([cost(g, self.tower.dims) for g in grids], self.ranks.mesh.world)
        rows = [
            self.tower.forward(self._sent([items[i].patches for i in group]), [grids[i] for i in group])
            for group in passes(grids, plan[self.ranks.rank])
        ]
        return self._gathered(rows, grids, plan)

    def check(self, item: Patched, tokens: int) -> None:
        """VisionError unless the tower takes this item and makes so many tokens of it."""
        self.tower.check(item.patches, [item.grid])
        if self.tower.tokens(item.grid) != tokens:
            raise VisionError(f"grid {item.grid}: makes {self.tower.tokens(item.grid)} tokens, {tokens} are its places")

    def largest(self) -> list[Patched]:
        """Items that fill a pass of every rank."""
        side = isqrt(self.rule.limit) // self.rule.merge * self.rule.merge
        patches = torch.zeros(side * side, 3, self.rule.patch, self.rule.patch, dtype=torch.uint8)
        return [Patched((1, side, side), patches)] * (self.ranks.mesh.world * max(1, PASS // len(patches)))

    def _sent(self, made: Sequence[Tensor]) -> Tensor:
        """Patches side by side on the device, normalized there if they are not; the copy waits for nothing."""
        device = self.tower.device
        whole = torch.cat(list(made))
        if device.type == "cuda":
            whole = whole.pin_memory().to(device, non_blocking=True)
        return normalized(whole, self.rule, self.tower.dtype) if whole.dtype == torch.uint8 else whole

    def _gathered(self, rows: Sequence[Tensor], grids: Sequence[Grid], plan: list[list[int]]) -> Tensor:
        """Rows of every rank's passes, in the order of the items."""
        tokens = [self.tower.tokens(g) for g in grids]
        none = torch.empty(0, self.tower.dims.text_hidden, dtype=self.tower.dtype, device=self.tower.device)
        every = self.ranks.gather(torch.cat([none, *rows]), [sum(tokens[i] for i in share) for share in plan])
        held = [i for share in plan for group in passes(grids, share) for i in group]
        parts = dict(zip(held, every.split([tokens[i] for i in held]), strict=True))  # type: ignore[no-untyped-call]
        return torch.cat([none, *(parts[i] for i in range(len(grids)))])
