"""Logits of whole sequences, for parity checks."""

import torch
from torch import Tensor

from runtime_min.kv import batch
from runtime_min.models.decoder import Decoder
from runtime_min.pages import Sequence
from runtime_min.pictures import Pictures, PromptError

CHUNK = 2048


def score(model: Decoder, ids: Tensor, chunk: int = CHUNK, pictures: Pictures | None = None) -> Tensor:
    """ids [B, T] int64 -> logits [B, T, V] float32 on the CPU; rows are independent sequences.

    pictures: by places in the rows one after another, b T + t.
    """
    rows, length = ids.shape
    check_ids(ids, model.dims.vocab)
    if length > model.cos.shape[0]:
        raise PromptError(f"ids of length {length} exceed the context of {model.cos.shape[0]}")
    out = torch.empty((rows, length, model.dims.vocab), dtype=torch.float32)
    for row in range(rows):
        cache, sequence = model.cache(length), Sequence()
        for start in range(0, length, chunk):
            part, first = ids[row, start : start + chunk].tolist(), row * length + start
            seen = None if pictures is None else pictures.within(first, first + len(part))
            step = batch(cache, [(sequence, part)], last=list(range(len(part))))
            out[row, start : start + len(part)] = model.forward(step, cache, seen).float()
    return out


def check_ids(ids: Tensor, vocab: int) -> None:
    """PromptError for no ids, or some outside the vocabulary."""
    if not ids.numel():
        raise PromptError("ids: is empty, expected at least one token")
    bad = ids[(ids < 0) | (ids >= vocab)]
    if len(bad):
        raise PromptError(f"ids: id {int(bad[0])} is outside the vocabulary 0..{vocab - 1}")
