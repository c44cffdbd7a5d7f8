"""What one step trains on: rows of ids drawn by (seed, step) from streams that lie on the device whole."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convert.demo.training import pictures as pics
from convert.demo.training import tokens
from convert.demo.training.chats import chats
from convert.demo.training.corpus import Corpus, CorpusError, Document, Entity

CHUNKS = 16
IGNORED = -100
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Rows of a step by what they hold."""

    python: int = 6
    packages: int = 14
    code: int = 10
    chats: int = 28
    pictures: int = 6

    @property
    def rows(self) -> int:
        return self.python + self.packages + self.code + self.chats + self.pictures


class Batch(NamedTuple):
    """ids [B, S + 1]. pads: flat places in ids[:, :-1] of the pictures' tokens, in order; patches of those pictures."""

    ids: Tensor
    pads: Tensor
    patches: Tensor

    @property
    def inputs(self) -> Tensor:
        return self.ids[:, :-1]

    @property
    def targets(self) -> Tensor:
        """What follows each input; a picture's places are nobody's guess."""
        return self.ids[:, 1:].masked_fill(self.ids[:, 1:] == tokens.PAD, IGNORED)


class PictureRow(NamedTuple):
    ids: Ids
    pads: Ids
    pictures: Ids


@dataclass(slots=True)
class Dataset:
    """stream: all ids [N]. spans: where each kind of text lies. chat_starts: where a conversation begins."""

    stream: Tensor
    spans: dict[str, tuple[int, int]]
    chat_starts: Ids
    picture_rows: list[PictureRow]
    patches: Tensor
    length: int

    def batch(self, mix: Mix, seed: int, step: int) -> Batch:
        """The rows of one step, pictures first; the same for the same (seed, step)."""
        draw = np.random.Generator(np.random.PCG64([seed, step]))
        shown = [self.picture_rows[i] for i in draw.integers(0, len(self.picture_rows), mix.pictures)]
        starts = [
            draw.integers(low, high - self.length - 1, count)
            for kind, count in (("python", mix.python), ("packages", mix.packages), ("code", mix.code))
            for low, high in (self.spans[kind],)
        ]
        starts.append(self.chat_starts[draw.integers(0, len(self.chat_starts), mix.chats)])
        first = self._sent(np.concatenate(starts))
        rows = self.stream[first[:, None] + torch.arange(self.length + 1, device=first.device)].long()
        if not shown:
            return Batch(rows, first[:0], self.patches[:0])
        made = self._sent(np.stack([r.ids for r in shown]))
        pads = np.concatenate([r.pads + i * self.length for i, r in enumerate(shown)])
        which = self._sent(np.concatenate([r.pictures for r in shown]))
        return Batch(torch.cat([made, rows]), self._sent(pads), self.patches[which])

    def _sent(self, values: Ids) -> Tensor:
        made = torch.from_numpy(values)
        device = self.stream.device
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def _mapped(work: Callable[[Any], Any], jobs: Sequence[Any], workers: int) -> list[Any]:
    if workers < 2:
        return [work(job) for job in jobs]
    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        return list(pool.map(work, jobs))


def text_ids(documents: Sequence[Document], seed: int, workers: int) -> Ids:
    """Documents in an order drawn with `seed`, each followed by [EOS]."""
    order = sorted(documents, key=lambda d: d.name)
    random.Random(seed).shuffle(order)
    end = tokens.IDS["[EOS]"]
    made = tokens.encoding().encode_ordinary_batch([d.text for d in order], num_threads=max(1, workers))
    return np.array([i for ids in made for i in (*ids, end)], dtype=np.int64)


def _conversations(job: tuple[Sequence[Entity], int, int]) -> list[list[int]]:
    return [tokens.rendered(chat) for chat in chats(*job)]


def _pictures(job: tuple[Sequence[pics.Digit], int, int]) -> tuple[pics.Pixels, list[list[int]]]:
    made = list(pics.pictures(*job))
    draw = random.Random(job[2])
    said = [tokens.rendered(pics.chat(p, draw), True, pics.TOKENS) for p in made]
    return pics.patches(np.stack([p.pixels for p in made])), said


def picture_rows(said: Sequence[list[int]], filling: Ids, length: int) -> list[PictureRow]:
    """Rows of length + 1 ids: as many whole exchanges as fit, then the beginning of `filling`."""
    rows, at = [], 0
    while at < len(said):
        ids: list[int] = []
        shown = []
        while at < len(said) and len(ids) + len(said[at]) <= length:
            ids += said[at]
            shown.append(at)
            at += 1
        if not shown:
            raise CorpusError(
                f"pictures: an exchange of {len(said[at])} ids does not fit a row of {length}; ask longer"
            )
        whole = np.concatenate([np.array(ids), filling[: length + 1 - len(ids)]])
        rows.append(PictureRow(whole, np.flatnonzero(whole == tokens.PAD), np.array(shown)))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """How much is made besides the texts."""

    chats: int = 64_000
    pictures: int = 16_000


def dataset(
    corpus: Corpus, digits: Sequence[pics.Digit], amounts: Amounts, length: int, seed: int, workers: int
) -> Dataset:
    """Everything that training sees, on the CPU."""
    spans, parts, at = {}, [], 0
    for kind in ("python", "packages", "code"):
        ids = text_ids([d for d in corpus.documents if d.kind == kind and not d.held_out], seed, workers)
        spans[kind] = (at, at + len(ids))
        parts.append(ids)
        at += len(ids)
    jobs = [(corpus.entities, amounts.chats // CHUNKS, seed * CHUNKS + i) for i in range(CHUNKS)]
    said = [chat for chunk in _mapped(_conversations, jobs, workers) for chat in chunk]
    starts = np.fromiter(accumulate(map(len, said[:-1]), initial=at), np.int64, len(said))
    parts.append(np.array([i for chat in said for i in chat], dtype=np.int64))
    whole = np.concatenate(parts)
    known = [d for d in digits if not d.held_out]
    drawn = _mapped(_pictures, [(known, amounts.pictures // CHUNKS, seed * CHUNKS + i) for i in range(CHUNKS)], workers)
    rows = picture_rows([s for _, chunk in drawn for s in chunk], parts[-1], length)
    return Dataset(
        stream=torch.from_numpy(whole.astype(np.int16)),
        spans=spans,
        chat_starts=starts[starts < len(whole) - length - 1],
        picture_rows=rows,
        patches=torch.from_numpy(np.concatenate([p for p, _ in drawn])),
        length=length,
    )
