"""How many shares a context is split into, from shapes alone: lengths stay on the device."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from runtime_min.kernels.index import KernelError
from runtime_min.kernels.launch import LOG2E, WIDEST, Kernels, Launch, power

# Blocks that fill the largest GPU of today once.
BLOCKS = 132
LONGEST = 16
MOST_SPLITS = 256
# What fits a block's shared memory beside `block` query rows.
RINGS = {16: 5, 32: 4, 64: 4}


@dataclass(frozen=True, slots=True)
class Config:
    """`block` query rows a program; `waves` times BLOCKS programs are aimed at; a share is at least `pages` pages.
    `ring`: halves of pages in the ring of the kernel whose pages have warps of their own (sm90); 0 is the other one."""

    block: int = 16
    waves: int = 1
    pages: int = 2
    warps: int = 4
    stages: int = 2
    ring: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """`heads` heads, up to `queries` query tokens a sequence, `sequences` of them, all rounded up to powers of two."""

    op: ClassVar[str] = "mla_decode"
    heads: int
    queries: int
    sequences: int
    latent: int
    rope: int
    page_tokens: int
    item: int = 2

    def default(self, shared: int = WIDEST) -> Config:
        block = max(16, min(64 if shared >= WIDEST else 16, self.heads * self.queries))
        return Config(block=block, warps=8 if block == 64 else 4, stages=2 if self.item == 2 else 1)

    def candidates(self) -> list[Config]:
        sizes = [b for b in (16, 32, 64) if b <= max(16, self.heads * self.queries)]
        return [
            Config(block=b, waves=w, pages=p, warps=n, stages=s)
            for b in sizes
            for w in (1, 2)
            for p in (1, 2, 4)
            for n in (4, 8)
            for s in ((2,) if self.page_tokens >= 64 else (2, 3))
        ] + [
            Config(block=b, waves=w, pages=p, ring=RINGS[b])
            for b in sizes
            for w in (1, 2)
            for p in (1, 2, 4)
            if self.streams
        ]

    @property
    def streams(self) -> bool:
        """Are these sizes that the kernel with a ring takes?"""
        return (self.latent, self.rope, self.page_tokens, self.item) == (512, 64, 64, 2)


def mla_decode(
    kernels: Kernels, q_lat: Tensor, q_pe: Tensor, rows: Tensor, pages: Tensor, cu_q: Tensor, lengths: Tensor,
    page_tokens: int, scale: float, longest: int = LONGEST, tree: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    tokens, heads, latent = q_lat.shape
    rope, sequences = q_pe.shape[2], len(lengths)
    out = torch.empty_like(q_lat)
    if not tokens:
        return out
    if not (q_lat.is_contiguous() and q_pe.is_contiguous() and rows.is_contiguous() and pages.stride(1) == 1):
        raise ValueError("mla_decode: q_lat, q_pe, rows and the rows of pages must be contiguous")
    queries = min(longest, tokens)
    item = q_lat.element_size()
    problem = Problem(power(heads), power(queries), power(sequences), latent, rope, page_tokens, item)
    config = kernels.pick(problem)
    if config.ring and not problem.streams:
        raise KernelError(f"{problem}: {config} has a ring; that takes latents of 512, keys and pages of 64, and bf16")
    blocks = -(-queries * heads // config.block)
    splits = max(1, config.waves * BLOCKS // (sequences * blocks))
    splits = min(splits, max(1, pages.shape[1] // config.pages), MOST_SPLITS)
    constants = {
        "H": heads, "L": latent, "R": rope, "P": page_tokens, "BLOCK": config.block, "ALONE": splits == 1,
        "TREE": tree is not None,
    }  # fmt: skip
    parts, state = out, out
    if splits > 1:
        parts = torch.empty(splits, tokens, heads, latent, dtype=torch.float32, device=out.device)
        state = torch.empty(splits, tokens, heads, 2, dtype=torch.float32, device=out.device)
    args: tuple[Any, ...] = (
        q_lat, q_pe, rows, pages, cu_q, lengths, parts, state, pages.stride(0), splits, scale * LOG2E, tokens,
        *(tree or (cu_q, cu_q)),
    )  # fmt: skip
    grid = (sequences, splits, blocks)
    if config.ring:
        constants["SLOTS"] = config.ring
        kernels.run(Launch(kernel="mla_decode.streamed", grid=grid, args=args, constants=constants))
    else:
        constants |= {"BL": power(latent), "BR": power(rope), "STAGES": config.stages}
        kernels.run(Launch(kernel="mla_decode.split", grid=grid, args=args, constants=constants, warps=config.warps))
    if splits > 1:
        _combine(kernels, parts, state, out)
    return out


def _combine(kernels: Kernels, parts: Tensor, state: Tensor, out: Tensor) -> None:
    """The shares' results [splits, tokens, heads, latent] into one, by programs that fill a card if there are few rows
    and have little to begin with if there are many."""
    splits, tokens, heads, latent = parts.shape
    rows = tokens * heads
    part = min(power(latent), 32 if rows <= 16 else 128 if rows <= 256 else 512)
    constants = {"H": heads, "L": latent, "BL": part, "BS": MOST_SPLITS, "BATCH": 16}
    grid, args = (rows, -(-latent // part), 1), (parts, state, out, splits, tokens)
    kernels.run(Launch(kernel="mla_decode.combine", grid=grid, args=args, constants=constants))
