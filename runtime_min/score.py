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


def score(model: Decoder, ids: Tensor, chunk: int = CHUNK) -> Tensor:
    """ids [B, T] int64 -> logits [B, T, V] float32 on the CPU; rows are independent sequences."""
    rows, length = ids.shape
    bad = ids[(ids < 0) | (ids >= model.dims.vocab)]
    if not ids.numel() or len(bad):
        found = f"id {bad[0]}" if len(bad) else "none"
        raise PromptError(f"ids: {found}; expected at least one, all inside the vocabulary 0..{model.dims.vocab - 1}")
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
