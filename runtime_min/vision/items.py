"""Pictures and clips as the model takes them: items with a grid, and patches cut from them on request."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from runtime_min.vision.picture import opened, rgb, upright_size
from runtime_min.vision.rule import Fit, MediaError, Rule

Kind = Literal["image", "video"]
WORKERS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One picture, or up to four frames of a clip. grid: (frames, rows, columns) of patches. tokens: what it costs."""

    where: str
    frames: tuple[Image.Image, ...]
    fit: Fit
    grid: tuple[int, int, int]
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Patched:
    """An item's patches [t h w, 3, p, p]: uint8 as `patches` cuts them, or in the model's units as `normalized`."""

    grid: tuple[int, int, int]
    patches: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """What one placeholder of a prompt stands for: an image is one item; a video several, each with its time."""

    where: str
    kind: Kind
    items: tuple[Item, ...]
    stamps: tuple[str, ...] = ()


def picture(where: str, data: bytes, rule: Rule) -> Media:
    """An image from the bytes of a file; MediaError for what `opened` refuses. Pixels are decoded by `patches`."""
    image = opened(where, data)
    return Media(where, "image", (_item(where, (image,), upright_size(where, image), rule, rule.limit),))


def clip(
    where: str, frames: Sequence[Image.Image], seconds: Sequence[float], rule: Rule, size: tuple[int, int] | None = None
) -> Media:
    """A video from frames that were sampled at these times, in chunks of a few frames each.

    size: what the frames measured before, if they were brought to the size of the rule's `fit` already.

    Raises MediaError if there are none, if times and frames differ in number, or frames in size.
    """
    if not frames or len(seconds) != len(frames):
        raise MediaError(f"{where}: {len(frames)} frames with {len(seconds)} times, expected a time for each, and one")
    sizes = [upright_size(f"{where} frame {i}", f) for i, f in enumerate(frames)]
    for i, (width, height) in enumerate(sizes):
        if (width, height) != sizes[0]:
            raise MediaError(f"{where} frame {i}: is {width} x {height}, the first is {sizes[0][0]} x {sizes[0][1]}")
    starts = range(0, len(frames), rule.chunk)
    items = (_item(where, tuple(frames[i : i + rule.chunk]), size or sizes[0], rule, rule.frame_limit) for i in starts)
    return Media(where, "video", tuple(items), tuple(stamp(where, seconds[i]) for i in starts))


def _item(where: str, frames: tuple[Image.Image, ...], size: tuple[int, int], rule: Rule, limit: int) -> Item:
    fit = rule.fit(*size, limit)
    rows, columns = rule.grid(fit)
    return Item(where, frames, fit, (len(frames), rows, columns), rows * columns // rule.merge**2)


def stamp(where: str, seconds: float) -> str:
    """HH:MM:SS.mmm, milliseconds cut off, hours from 24 on beginning anew as in the reference."""
    if not 0 <= seconds < float("inf"):
        raise MediaError(f"{where}: time {seconds} s, expected one from 0 up")
    whole = int(seconds)
    hours, minutes = whole // 3600 % 24, whole // 60 % 60
    return f"{hours:02d}:{minutes:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"


def resized(where: str, image: Image.Image, fit: Fit) -> Image.Image:
    """`image` in RGB at the size of `fit`; MediaError if it cannot be decoded."""
    plain = rgb(where, image)
    size = (fit.width, fit.height)
    return plain if plain.size == size else plain.resize(size, Image.Resampling.BICUBIC)


def patches(item: Item, patch: int) -> Tensor:
    """The item's patches [t h w, 3, p, p] uint8, frame by frame, row by row; padding is 0."""
    t, h, w = item.grid
    out = torch.empty(t, h, w, 3, patch, patch, dtype=torch.uint8)
    for i, frame in enumerate(item.frames):
        where = item.where if t == 1 else f"{item.where} frame {i}"
        pixels = torch.frombuffer(bytearray(resized(where, frame, item.fit).tobytes()), dtype=torch.uint8)
        canvas = torch.zeros(h * patch, w * patch, 3, dtype=torch.uint8)
        canvas[: item.fit.height, : item.fit.width] = pixels.view(item.fit.height, item.fit.width, 3)
        out[i] = canvas.view(h, patch, w, patch, 3).permute(0, 2, 4, 1, 3)
    return out.flatten(0, 2)


def normalized(raw: Tensor, rule: Rule, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 patches in the model's units, (x / 255 - mean) / std, on the device where they are."""
    mean, std = (torch.tensor(v, device=raw.device)[:, None, None] * 255 for v in (rule.mean, rule.std))
    return ((raw.float() - mean) / std).to(dtype)


def prepared(items: Sequence[Item], patch: int) -> list[Patched]:
    """Every item's patches, made in threads. MediaError for the first picture that cannot be decoded."""
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            made = list(pool.map(lambda item: patches(item, patch), items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [Patched(item.grid, raw) for item, raw in zip(items, made, strict=True)]


def digest(item: Patched) -> bytes:
    """Names an item by what the model sees of it: equal digests give equal embeddings."""
    return hashlib.sha256(repr(item.grid).encode() + item.patches.numpy().tobytes()).digest()
