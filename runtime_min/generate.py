"""The smallest loop over tokens: one prompt in, tokens out; and logits of whole sequences for parity checks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime_min.kv import Sequence, batch
from runtime_min.models.decoder import Decoder
from runtime_min.sample import Sampling, sample
from specs.errors import InputError

CHUNK = 2048


class PromptError(InputError):
    """Token ids or lengths that this model cannot take."""


def check_ids(ids: list[int], vocab: int, what: str) -> None:
    """PromptError for an empty prompt or ids outside the vocabulary."""
    if not ids:
        raise PromptError(f"{what}: is empty, expected at least one token")
    bad = [i for i in ids if not 0 <= i < vocab]
    if bad:
        raise PromptError(f"{what}: id {bad[0]} is outside the vocabulary 0..{vocab - 1}")


def generate(
    model: Decoder,
    prompt: list[int],
    *,
    tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stops: frozenset[int] = frozenset(),
    chunk: int = CHUNK,
) -> Iterator[int]:
    """Up to `tokens` ids after `prompt`, one at a time; a stop id ends it and is given too.

    The prompt goes in by chunks of `chunk` tokens. Every rank runs this loop and sees the same ids.
    """
    check_ids(prompt, model.dims.vocab, "prompt")
    limit = model.cos.shape[0]
    if len(prompt) + tokens > limit:
        raise PromptError(f"prompt of {len(prompt)} and {tokens} new tokens exceed the context of {limit}")
    cache, sequence = model.cache(len(prompt) + tokens), Sequence()
    generator = torch.Generator().manual_seed(seed)
    logits: Tensor | None = None
    for start in range(0, len(prompt), chunk):
        logits = model.forward(batch(cache, [(sequence, prompt[start : start + chunk])]), cache)
    for step in range(tokens):
        assert logits is not None
        if not bool(torch.isfinite(logits).all()):
            raise PromptError(f"logits after token {sequence.length} are not finite; is the artifact damaged?")
        token = int(model.ranks.agreed(sample(logits, sampling, generator)))
        yield token
        if token in stops or step + 1 == tokens:
            return
        logits = model.forward(batch(cache, [(sequence, [token])]), cache)


def score(model: Decoder, ids: Tensor, chunk: int = CHUNK) -> Tensor:
    """ids [B, T] int64 -> logits [B, T, V] float32 on the CPU; rows are independent sequences."""
    rows, length = ids.shape
    check_ids(ids.flatten().tolist(), model.dims.vocab, "ids")
    if length > model.cos.shape[0]:
        raise PromptError(f"ids of length {length} exceed the context of {model.cos.shape[0]}")
    out = torch.empty((rows, length, model.dims.vocab), dtype=torch.float32)
    for row in range(rows):
        cache, sequence = model.cache(length), Sequence()
        for start in range(0, length, chunk):
            part = ids[row, start : start + chunk].tolist()
            out[row, start : start + len(part)] = model.forward(
                batch(cache, [(sequence, part)], every=True), cache
            ).float()
    return out
