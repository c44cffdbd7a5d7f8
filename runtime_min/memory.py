"""What the card's memory is spent on, decided before the cache is made and told at the start."""

import gc
from dataclasses import dataclass

import torch

from runtime_min.graphs import sizes
from runtime_min.kv import LatentCache, batch
from runtime_min.models.decoder import Decoder
from runtime_min.pages import PAGE_TOKENS, Sequence
from runtime_min.sampler import Sampler
from runtime_min.scheduler import Limits
from specs.errors import InputError

# Tokens in the cache where nobody says, and no card limits them.
HOST_TOKENS = 1 << 15
# Expanded keys of a long context, at most.
EXPANDED = 256 << 20
# Nodes and parameters of one captured step of some thousand launches.
GRAPH = 32 << 20


class MemoryPlanError(InputError):
    """The cache that was asked for, or any at all, does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by use. left: what the card keeps free of us."""

    total: int
    weights: int
    workspace: int
    graphs: int
    page_bytes: int
    pages: int
    left: int

    @property
    def cache(self) -> int:
        return self.pages * self.page_bytes

    def line(self) -> str:
        """One line for people."""
        parts = {
            "weights": self.weights, "cache": self.cache, "graphs": self.graphs, "workspace": self.workspace,
            "left": self.left,
        }  # fmt: skip
        told = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        return f"memory: {told} of {self.total / 1e9:.2f} GB; {self.pages * PAGE_TOKENS} tokens in the cache"


def plan(
    *, total: int, free: int, weights: int, workspace: int, graphs: int, page_bytes: int, least: float,
    asked: int | None,
) -> MemoryPlan:  # fmt: skip
    """Pages for `asked` tokens, or for as many as fit when `least` of the card stays free.

    MemoryPlanError if what was asked for does not fit, or not even one page does.
    """
    room = free - int(least * total) - workspace - graphs
    fit = max(0, room // page_bytes - 1)
    pages = fit if asked is None else -(-asked // PAGE_TOKENS)
    if pages > fit or not pages:
        raise MemoryPlanError(
            f"memory: {max(1, pages) * PAGE_TOKENS} tokens want {max(1, pages) * page_bytes / 1e9:.2f} GB of cache, "
            f"{max(0, room) / 1e9:.2f} GB are left for {fit * PAGE_TOKENS} of {total / 1e9:.2f} GB: weights take "
            f"{weights / 1e9:.2f}, workspace {workspace / 1e9:.2f}, graphs {graphs / 1e9:.2f}; ask for fewer cache "
            "tokens, running requests or tokens a step"
        )
    left = free - workspace - graphs - (pages + 1) * page_bytes
    return MemoryPlan(
        total=total, weights=weights, workspace=workspace, graphs=graphs, page_bytes=page_bytes, pages=pages, left=left
    )


def measured(model: Decoder, limits: Limits, context: int) -> MemoryPlan | None:
    """The plan for this card, its workspace measured by running the largest steps; None on a host."""
    device = model.settings.device
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    step = min(limits.step_tokens, context)
    cache = model.cache(max(step, limits.running * PAGE_TOKENS))
    prompt = _peak(model, cache, [step], limits)
    decode = _peak(model, cache, [1] * limits.running, limits)
    counts = sizes(limits.graphs)
    logits = sum(counts) * model.dims.vocab * model.embed.element_size()
    graphs = int(1.2 * decode) + logits + GRAPH * len(counts) if counts else 0
    page_bytes = cache.rows[:, :PAGE_TOKENS].numel() * cache.rows.element_size()
    del cache
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    workspace = max(prompt, decode) + EXPANDED + Sampler.nbytes(limits.running, model.dims.vocab)
    return plan(
        total=total, free=free, weights=weights, workspace=workspace, graphs=graphs, page_bytes=page_bytes,
        least=1 - limits.memory, asked=limits.cache_tokens,
    )  # fmt: skip


def _peak(model: Decoder, cache: LatentCache, queries: list[int], limits: Limits) -> int:
    """Bytes that a step of these query tokens takes on top, and the sampling of as many rows as may be."""
    sequences = [Sequence() for _ in queries]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = model.forward(batch(cache, [(s, [0] * n) for s, n in zip(sequences, queries, strict=True)]), cache)
    wide = logits.new_zeros((limits.running, model.dims.vocab)).double()
    (wide.sort(-1).values.softmax(-1).cumsum(-1) + wide).argmax(-1)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    for s in sequences:
        cache.pool.release(s)
    return peak
