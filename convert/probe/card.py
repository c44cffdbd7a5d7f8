"""GPU memory of one rank: what weights, cache and reserves take, against what the card has."""

from dataclasses import dataclass
from typing import Any

from convert.probe.line import Line
from convert.tables import size
from specs.dims import TextDims

CACHE_BYTES = 2
# Reserves, assumed and shown: captured graphs with their pools; the attention workspace and a chunk's activations;
# driver context, loaded kernels and communication buffers.
GRAPH_BYTES = 2 << 30
WORKSPACE_BYTES = 1 << 30
CONTEXT_BYTES = 1 << 30
RESERVES = GRAPH_BYTES + WORKSPACE_BYTES + CONTEXT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU. memory in bytes; source: where that number is from."""

    name: str
    memory: int
    source: str


def nominal(arch: dict[str, Any], gigabytes: float | None) -> Card:
    """The card of an architecture, or of --gpu-memory."""
    if gigabytes is not None:
        return Card(name=arch["name"], memory=int(gigabytes * 1e9), source="by --gpu-memory")
    return Card(name=arch["card"], memory=int(arch["memory_gb"] * 1e9), source="nominal")


def token_bytes(dims: TextDims) -> int:
    """Latent cache of one token over all layers; every rank holds all of it."""
    return dims.kv_a * CACHE_BYTES * dims.layers


def memory_line(card: Card, weights: int, dims: TextDims, context: int | None) -> Line:
    """Weights, the cache of `context` tokens and the reserves, against the card."""
    if context is not None and context > dims.context:
        return Line(
            name="gpu memory",
            verdict="no-go",
            found=f"--context {context:,}: the model ends at {dims.context:,} tokens",
            do=f"use --context {dims.context} or less",
        )
    tokens, each = context or dims.context, token_bytes(dims)
    need = weights + tokens * each + RESERVES
    room = max(0, (card.memory - weights - RESERVES) // each)
    parts = (
        f"weights {size(weights)} + cache {size(tokens * each)} for {tokens:,} tokens + graphs {size(GRAPH_BYTES)} "
        f"+ workspace {size(WORKSPACE_BYTES)} + driver {size(CONTEXT_BYTES)} (reserves assumed)"
    )
    facts = {
        "card": card.name,
        "card_bytes": card.memory,
        "needed_bytes": need,
        "weights_bytes": weights,
        "cache_bytes": tokens * each,
        "cache_bytes_per_token": each,
        "graph_bytes": GRAPH_BYTES,
        "workspace_bytes": WORKSPACE_BYTES,
        "driver_bytes": CONTEXT_BYTES,
        "room_tokens": room,
    }
    state = f"each rank {size(need)} of {size(card.memory)} ({card.name}, {card.source}): {parts}"
    if need <= card.memory:
        return Line(name="gpu memory", verdict="go", found=f"{state}; room for {room:,} tokens in all", facts=facts)
    short = f"{size(need - card.memory)} too much; cut over more ranks, or name a larger card by --gpu-memory"
    do = f"{short}, or use --context {room}" if room else short
    return Line(name="gpu memory", verdict="no-go", found=state, do=do, facts=facts)
