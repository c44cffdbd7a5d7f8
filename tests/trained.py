"""The trained model's held-out digits as pictures, and whether the engine names them."""

import io
from pathlib import Path

import torch
from PIL import Image

from convert.demo import shipped
from convert.demo.training.pictures import Digit, shown
from runtime_min.artifact import Artifact
from runtime_min.bench.quality import answers, question
from runtime_min.engine import Engine
from runtime_min.request import Limits
from runtime_min.text import Tokenizer

# Documents that every mesh is measured on; the whole held-out text takes minutes.
SAMPLE = 4


def digit_pictures() -> list[tuple[bytes, str]]:
    """(PNG, what is to be said) of every held-out digit."""
    out = []
    for digit in shipped.facts("heldout")["digits"]:
        gray = torch.tensor(list(bytes.fromhex(digit["gray"])), dtype=torch.uint8).view(8, 8).numpy()
        picture, png = shown(Digit(gray, digit["label"])), io.BytesIO()
        Image.fromarray(picture.pixels).save(png, "PNG")
        out.append((png.getvalue(), picture.say))
    return out


def digit_answers(path: Path, pictures: list[tuple[bytes, str]]) -> list[bool]:
    """Whether the engine says of each what it shows, word for word."""
    artifact, tokenizer = Artifact.open(path), Tokenizer.open(path)
    limits = Limits(running=8, step_tokens=512, cache_tokens=4096)
    asked = [question(artifact, tokenizer, "What do you see?", png, 16) for png, _ in pictures]
    with Engine(path, limits, device="cpu", dtype="float32") as engine:
        said = answers(engine, tokenizer, asked)
    return [answer.ends and answer.says == say for answer, (_, say) in zip(said, pictures, strict=True)]
