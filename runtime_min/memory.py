"""What the card's memory is spent on, decided before the cache is made and told at the start."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from runtime_min.embeddings import Encode
from runtime_min.graphs import sizes
from runtime_min.kv import LatentCache, batch
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Sequence
from runtime_min.request import Limits
from runtime_min.sample import Sampling
from runtime_min.sampler import Row, Sampler
from runtime_min.scheduler import SCORED
from runtime_min.speculate.draft import Draft
from runtime_min.speculate.pace import Pace
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
    page_tokens: int
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
        return f"memory: {told} of {self.total / 1e9:.2f} GB; {self.pages * self.page_tokens} tokens in the cache"


def plan(
    *, total: int, free: int, weights: int, workspace: int, graphs: int, page_bytes: int, limits: Limits
) -> MemoryPlan:  # fmt: skip
    """Pages for the tokens that `limits` ask for, or for as many as fit in their share of the card.

    MemoryPlanError if what was asked for does not fit, or not even one page does.
    """
    room = free - int((1 - limits.memory) * total) - workspace - graphs
    fit, size = max(0, room // page_bytes - 1), limits.page_tokens
    pages = fit if limits.cache_tokens is None else -(-limits.cache_tokens // size)
    if pages > fit or not pages:
        raise MemoryPlanError(
            f"memory: {max(1, pages) * size} tokens want {max(1, pages) * page_bytes / 1e9:.2f} GB of cache, "
            f"{max(0, room) / 1e9:.2f} GB are left for {fit * size} of {total / 1e9:.2f} GB: weights take "
            f"{weights / 1e9:.2f}, workspace {workspace / 1e9:.2f}, graphs {graphs / 1e9:.2f}; ask for fewer cache "
            "tokens, running requests or tokens a step"
        )
    left = free - workspace - graphs - (pages + 1) * page_bytes
    return MemoryPlan(
        total=total, weights=weights, workspace=workspace, graphs=graphs, page_bytes=page_bytes, page_tokens=size,
        pages=pages, left=left,
    )  # fmt: skip


def measured(
    model: Decoder, limits: Limits, context: int, encode: Encode | None, draft: Draft | None, pace: Pace | None
) -> MemoryPlan | None:
    """The plan for this card, its workspace measured by running the largest steps and encoding the largest pictures;
    None on a host."""
    device = model.settings.device
    if device.type != "cuda":
        return None
    emptied()
    weights = torch.cuda.memory_allocated(device)
    step, size = min(limits.step_tokens, context), limits.page_tokens
    cache = model.cache(max(step, limits.running * size), size)
    prompt = taken(partial(largest, model, cache, [step]))
    decode = taken(partial(largest, model, cache, [1] * limits.running))
    drafted = 0 if draft is None or pace is None else drafting(model, cache, limits, draft, pace)
    pictures = 0 if encode is None else taken(lambda: encode(encode.largest()))
    counts = sizes(limits.graphs)
    logits = sum(counts) * model.dims.vocab * model.embed.element_size()
    graphs = int(1.2 * decode) + logits + GRAPH * len(counts) if counts else 0
    page_bytes = cache.rows[:, :size].numel() * cache.rows.element_size()
    if draft is not None and pace is not None:
        page_bytes += size * draft.cached
        more = sizes(pace.rows(limits.graphs)) if counts else ()
        wide = model.dims.vocab + len(draft.taps) * model.dims.hidden
        graphs += sum(more) * wide * model.embed.element_size() + GRAPH * len(more)
    del cache
    emptied()
    free, total = torch.cuda.mem_get_info(device)
    workspace = max(prompt, decode, pictures) + drafted + EXPANDED + Sampler.nbytes(limits.running, model.dims.vocab)
    if encode is not None:
        workspace += limits.pictures * model.dims.hidden * model.embed.element_size()
    return plan(
        total=total, free=free, weights=weights, workspace=workspace, graphs=graphs, page_bytes=page_bytes,
        limits=limits,
    )  # fmt: skip


def emptied() -> None:
    """Gives back what nothing holds any more."""
    gc.collect()
    torch.cuda.empty_cache()


def taken(work: Callable[[], object]) -> int:
    """Bytes that `work` takes at most on top of what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def drafting(model: Decoder, cache: LatentCache, limits: Limits, draft: Draft, pace: Pace) -> int:
    """Bytes that drafts take on top: a step that verifies as many as there may be, states of two steps, and the
    distributions that a step's drafts were drawn from, in FP32."""
    few = pace.rows(limits.running) // limits.running
    verify = taken(partial(largest, model, cache, [few] * limits.running, True))
    states = 2 * limits.step_tokens * len(draft.taps) * model.dims.hidden * model.embed.element_size()
    return verify + states + (few - 1) * limits.running * model.dims.vocab * 4


def largest(model: Decoder, cache: LatentCache, queries: list[int], every: bool = False) -> None:
    """A step of these query tokens, with the sampling of its rows, of the last tokens or of `every`, and, once, that of
    as many scored rows as a step may have."""
    sequences = [Sequence() for _ in queries]
    sampler = Sampler(len(queries), model.dims.vocab, cache.rows.device)
    sampling = Sampling(temperature=1.0, top_p=0.9, presence=0.1, logprobs=20)
    tokens = sum(queries)
    slots = [i for i, n in enumerate(queries) for _ in range(n if every else 1)]
    rows = [Row(sampling=sampling, seed=i, position=1, slot=i) for i in slots]
    work = [(s, [0] * n) for s, n in zip(sequences, queries, strict=True)]
    step = batch(cache, work, list(range(tokens)) if every else None)
    logits = model.forward(step, cache)
    sampler(logits, rows, 20, model.ranks.agreed)
    scored = [Row(sampling=Sampling(logprobs=20), seed=0, position=1, slot=None, target=0)] * SCORED
    sampler(logits[:1].expand(SCORED, -1), scored, 20, model.ranks.agreed)
    for s in sequences:
        cache.pool.release(s)
