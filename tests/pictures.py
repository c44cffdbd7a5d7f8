"""Pictures drawn for tests: gradients with marks, saved in whatever format."""

import base64
import io
from typing import Any

import torch
from PIL import Image

from runtime_min.vision.rule import Rule

RULE = Rule(
    patch=14, merge=2, limit=16384, frame_limit=4096, side_limit=512, mean=(0.5,) * 3, std=(0.5,) * 3, fps=2.0, chunk=4
)  # fmt: skip


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth colour gradient with a square at the upper left, different for every seed."""
    y = torch.arange(height)[:, None] / max(1, height - 1)
    x = torch.arange(width)[None] / max(1, width - 1)
    colour = torch.rand(3, generator=torch.Generator().manual_seed(seed))
    canvas = torch.stack([x.expand(height, width), y.expand(height, width), (x + y) / 2], -1) * (0.5 + colour / 2)
    pixels = (canvas * 255).byte()
    pixels[: height // 4, : width // 4] = torch.tensor([250, 40, 10 + seed % 200], dtype=torch.uint8)
    return Image.frombytes("RGB", (width, height), bytes(pixels.flatten().tolist()))


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}
