"""The smallest loop over tokens: one prompt in, tokens out; and logits of whole sequences for parity checks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime_min.kv import Sequence, batch
from runtime_min.models.decoder import Decoder
from runtime_min.pictures import Pictures, PromptError
from runtime_min.sample import Sampling, sample

CHUNK = 2048


def check_ids(ids: list[int], vocab: int, what: str) -> None:
    """PromptError for an empty prompt or ids outside the vocabulary."""
    if not ids:
        raise PromptError(f"{what}: is empty, expected at least one token")
    bad = [i for i in ids if not 0 <= i < vocab]
    if bad:
        raise PromptError(f"{what}: id {bad[0]} is outside the vocabulary 0..{vocab - 1}")


def check_length(model: Decoder, prompt: int, tokens: int) -> None:
    """PromptError if a prompt and its answer do not fit the context."""
    limit = model.cos.shape[0]
    if prompt + tokens > limit:
        raise PromptError(f"prompt of {prompt} and {tokens} new tokens exceed the context of {limit}")


def generate(
    model: Decoder,
    prompt: list[int],
    *,
    tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stops: frozenset[int] = frozenset(),
    chunk: int = CHUNK,
    pictures: Pictures | None = None,
) -> Iterator[int]:
    """Up to `tokens` ids after `prompt`, one at a time; a stop id ends it and is given too.

    The prompt goes in by chunks of `chunk` tokens, `pictures` at their places. Every rank runs this loop and sees the
    same ids.
    """
    check_ids(prompt, model.dims.vocab, "prompt")
    check_length(model, len(prompt), tokens)
    cache, sequence = model.cache(len(prompt) + tokens), Sequence()
    generator = torch.Generator().manual_seed(seed)
    logits: Tensor | None = None
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        seen = None if pictures is None else pictures.within(start, start + len(part))
        logits = model.forward(batch(cache, [(sequence, part)]), cache, seen)
    for step in range(tokens):
        assert logits is not None
        if not bool(torch.isfinite(logits).all()):
            raise PromptError(f"logits after token {sequence.length} are not finite; is the artifact damaged?")
        token = int(model.ranks.agreed(sample(logits, sampling, generator)))
        yield token
        if token in stops or step + 1 == tokens:
            return
        logits = model.forward(batch(cache, [(sequence, [token])]), cache)


def score(model: Decoder, ids: Tensor, chunk: int = CHUNK, pictures: Pictures | None = None) -> Tensor:
    """ids [B, T] int64 -> logits [B, T, V] float32 on the CPU; rows are independent sequences.

    pictures: by places in the rows one after another, b T + t.
    """
    rows, length = ids.shape
    check_ids(ids.flatten().tolist(), model.dims.vocab, "ids")
    if length > model.cos.shape[0]:
        raise PromptError(f"ids of length {length} exceed the context of {model.cos.shape[0]}")
    out = torch.empty((rows, length, model.dims.vocab), dtype=torch.float32)
    for row in range(rows):
        cache, sequence = model.cache(length), Sequence()
        for start in range(0, length, chunk):
            part, first = ids[row, start : start + chunk].tolist(), row * length + start
            seen = None if pictures is None else pictures.within(first, first + len(part))
            out[row, start : start + len(part)] = model.forward(
                batch(cache, [(sequence, part)], every=True), cache, seen
            ).float()
    return out
