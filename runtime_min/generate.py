"""Logits of whole sequences, for parity checks."""

import torch
from torch import Tensor

from runtime_min.kv import batch
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Sequence
from specs.errors import InputError

CHUNK = 2048


class PromptError(InputError):
    """A prompt, or ids, that this model cannot take."""


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
            step = batch(cache, [(sequence, part)], last=list(range(len(part))))
            out[row, start : start + len(part)] = model.forward(step, cache).float()
    return out
