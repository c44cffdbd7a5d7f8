"""Decode and verify steps as CUDA graphs, one for each of a few padded token counts.

Query lengths, page tables and slots are device data with fixed maxima, so nothing but the number of tokens is baked in.
A real step is filled up with sequences of one token that write nothing and see only the null page.
"""

import torch
from torch import Tensor

from runtime_min.kernels.launch import capturing
from runtime_min.kv import Batch, LatentCache, Part, Tree
from runtime_min.models.decoder import Decoder

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WARM = 2


def sizes(most: int) -> tuple[int, ...]:
    """Token counts to capture for steps of up to `most` tokens."""
    return tuple(n for n in SIZES if n < most) + ((most,) if most else ())


class Graphs:
    """Captured steps of one model over one cache, of up to `queries` tokens a sequence. logits[n]: [n, V]; states[n]:
    [n, taps * hidden], None without taps."""

    def __init__(
        self,
        model: Decoder,
        cache: LatentCache,
        counts: tuple[int, ...],
        queries: int,
        width: int,
        taps: tuple[int, ...] = (),
        trees: bool = False,
    ) -> None:
        """width: the most pages of a sequence; taps: layers whose outputs are kept; trees: tokens are trees' nodes."""
        most, device = max(counts), cache.rows.device
        self.model, self.cache, self.queries, self.taps = model, cache, queries, taps
        # One allocation each: kernels count on tensors that begin on 16 bytes.
        self.ids, self.positions, self.slots = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(3))
        self.cu_q = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.lengths = torch.ones(most, dtype=torch.int32, device=device)
        self.pages = torch.zeros((most, width), dtype=torch.int32, device=device)
        self.last = torch.arange(most, device=device)
        self.slots.fill_(-1)
        self.tree: Tree | None = None
        if trees:
            # A node of its own sees its own key.
            self.tree = Tree(torch.zeros_like(self.lengths), torch.ones_like(self.ids))
        self.captured: dict[int, torch.cuda.CUDAGraph] = {}
        self.logits: dict[int, Tensor] = {}
        self.states: dict[int, Tensor | None] = {}
        self.counts = tuple(sorted(counts))

    def capture(self) -> None:
        """Captures every size, the largest first, in one pool of memory. Every rank does so at the same time."""
        pool, stream = torch.cuda.graph_pool_handle(), capturing(self.cache.rows.device.index)
        for n in reversed(self.counts):
            self.model.ranks.every(n)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(WARM):
                    self.model.tapped(self.batch(n), self.cache, taps=self.taps)
            torch.cuda.synchronize()
            self.captured[n] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.captured[n], pool=pool, stream=stream):
                self.logits[n], self.states[n] = self.model.tapped(self.batch(n), self.cache, taps=self.taps)

    def batch(self, n: int) -> Batch:
        """The step of n tokens over the fixed tensors."""
        part = Part(
            first=0,
            last=n,
            cu_q=self.cu_q[: n + 1],
            lengths=self.lengths[:n],
            pages=self.pages[:n],
            longest=self.queries,
            bounds=((), ()),
            tree=None if self.tree is None else Tree(self.tree.prefix[:n], self.tree.visible[:n]),
        )
        return Batch(
            ids=self.ids[:n],
            positions=self.positions[:n],
            slots=self.slots[:n],
            last=self.last[:n],
            parts=(part,),
            rows=n,
        )

    def size(self, tokens: int) -> int | None:
        """The smallest captured count that holds `tokens`."""
        return next((n for n in self.counts if n >= tokens), None)

    def fill(self, batch: Batch) -> int:
        """Copies a step whose tokens, padding included, are a captured count; that count. Sequences beyond it get no
        query tokens, and nothing looks at the rest of their rows."""
        n, (part,) = len(batch.ids), batch.parts
        count, widest = part.pages.shape
        for mine, given in ((self.ids, batch.ids), (self.positions, batch.positions), (self.slots, batch.slots)):
            mine[:n].copy_(given)
        self.cu_q[: count + 1].copy_(part.cu_q)
        self.cu_q[count + 1 : n + 1].fill_(n)
        self.lengths[:count].copy_(part.lengths)
        self.pages[:count, :widest].copy_(part.pages)
        if self.tree is not None and part.tree is not None:
            self.tree.prefix[:count].copy_(part.tree.prefix)
            self.tree.visible[:n].copy_(part.tree.visible)
        return n

    def replay(self, batch: Batch) -> Tensor:
        """Logits [n, V] of the tokens batch.last."""
        n = self.fill(batch)
        self.captured[n].replay()
        return self.logits[n].index_select(0, batch.last)
