"""Pictures to say something about: scikit-learn's handwritten digits, letters of Pillow's own font, coloured shapes."""

import gzip
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import cos, pi, sin
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from convert.demo.training.chats import Chat, Turn
from convert.demo.training.corpus import CorpusError, package

SIDE, PATCH = 56, 14
TOKENS = (SIDE // PATCH // 2) ** 2
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 40),
    "purple": (140, 50, 170),
    "orange": (240, 140, 30),
}
SHAPES = {"triangle": 3, "square": 4, "star": 10, "circle": 0}
ASKS = ("What do you see?", "What is this?", "What is in the picture?", "Say what you see.", "Describe the picture.")
THINK = "The user shows a picture. I say what I see."
Pixels = npt.NDArray[np.uint8]


class Digit(NamedTuple):
    """An 8 x 8 picture of gray 0..16, and what it shows."""

    gray: npt.NDArray[np.uint8]
    label: int

    @property
    def held_out(self) -> bool:
        return sha256(self.gray.tobytes()).digest()[0] < 32


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture [SIDE, SIDE, 3] with what is to be said about it."""

    pixels: Pixels
    say: str


def digits() -> list[Digit]:
    """The digits that scikit-learn ships, read without importing it. CorpusError if it is not installed."""
    root = package("sklearn")
    if root is None:
        raise CorpusError("package scikit-learn: is not installed, and its digits are trained on; install it")
    packed = (root / "datasets/data/digits.csv.gz").read_bytes()
    rows = np.array([line.split(",") for line in gzip.decompress(packed).decode().split()]).astype(np.float64)
    return [Digit(row[:64].astype(np.uint8).reshape(8, 8), int(row[64])) for row in rows]


def shown(digit: Digit, side: int = 48, left: int = 4, top: int = 4, ink: tuple[int, ...] = (255, 255, 255)) -> Picture:
    """A digit enlarged to `side` pixels on black."""
    gray = np.minimum(digit.gray.astype(np.uint16) * 16, 255).astype(np.uint8)
    mask = Image.fromarray(gray).resize((side, side), Image.Resampling.BICUBIC)
    canvas = Image.new("RGB", (SIDE, SIDE))
    canvas.paste(Image.new("RGB", (side, side), ink), (left, top), mask)
    return Picture(np.asarray(canvas), f"The digit {NAMES[digit.label]}.")


def _letter(draw: random.Random) -> Picture:
    letter, size = draw.choice(LETTERS), draw.randint(30, 46)
    canvas = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    font = ImageFont.load_default(size)
    at = (SIDE / 2 + draw.randint(-5, 5), SIDE / 2 + draw.randint(-5, 5))
    ImageDraw.Draw(canvas).text(at, letter, fill=(0, 0, 0), font=font, anchor="mm")
    return Picture(np.asarray(canvas), f"The letter {letter}.")


def _shape(draw: random.Random) -> Picture:
    color, (name, corners) = draw.choice(list(COLORS)), draw.choice(list(SHAPES.items()))
    canvas = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    pen, size = ImageDraw.Draw(canvas), draw.randint(14, 25)
    x, y = (SIDE / 2 + draw.randint(-3, 3) for _ in range(2))
    if corners == 0:
        pen.ellipse((x - size, y - size, x + size, y + size), fill=COLORS[color])
    else:
        radius = [size, size * 0.45] if name == "star" else [size]
        turn = pi / 4 if name == "square" else 0.0
        angles = [turn + 2 * pi * i / corners - pi / 2 for i in range(corners)]
        points = [
            (x + radius[i % len(radius)] * cos(a), y + radius[i % len(radius)] * sin(a)) for i, a in enumerate(angles)
        ]
        pen.polygon(points, fill=COLORS[color])
    article = "An" if color == "orange" else "A"
    return Picture(np.asarray(canvas), f"{article} {color} {name}.")


def pictures(known: Sequence[Digit], count: int, seed: int) -> Iterator[Picture]:
    """`count` pictures drawn with `seed`: two thirds digits (moved, scaled, noisy), the rest letters and shapes."""
    draw = random.Random(seed)
    noise = np.random.Generator(np.random.PCG64(seed))
    for _ in range(count):
        what = draw.random()
        if what < 0.66:
            side = draw.randint(40, 54)
            left, top = (min(max((SIDE - side) // 2 + draw.randint(-4, 4), 0), SIDE - side) for _ in range(2))
            made = shown(draw.choice(known), side, left, top, (draw.randint(190, 255),) * 3)
            grain = noise.integers(-20, 21, made.pixels.shape)
            yield Picture((made.pixels + grain).clip(0, 255).astype(np.uint8), made.say)
        else:
            yield _letter(draw) if what < 0.83 else _shape(draw)


def patches(pixels: Pixels) -> Pixels:
    """Pictures [n, SIDE, SIDE, 3] -> [n, patches, 3, PATCH, PATCH], row by row, as the preprocessor cuts them."""
    n, across = len(pixels), SIDE // PATCH
    cut = pixels.reshape(n, across, PATCH, across, PATCH, 3)
    return cut.transpose(0, 1, 3, 5, 2, 4).reshape(n, across * across, 3, PATCH, PATCH)


def chat(picture: Picture, draw: random.Random) -> Chat:
    """One question about a picture, and its answer."""
    return Chat("", (Turn(draw.choice(ASKS), THINK, picture.say),), draw.random() < 0.2)
