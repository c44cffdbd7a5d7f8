"""Video files, by PyAV if it is installed: frames at the rule's rate, kept at the size the model sees."""

import io
from collections.abc import Iterator
from typing import Any

from PIL import Image

from runtime_min.vision.items import Media, clip, resized
from runtime_min.vision.picture import MAX_PIXELS
from runtime_min.vision.rule import Fit, MediaError, Rule

# An hour and more at two a second, and beyond the context at any but the smallest size.
MAX_FRAMES = 8192


def chosen(total: int, rate: float, fps: float) -> list[int]:
    """Which of `total` frames at `rate` a second are taken: evenly, `fps` a second, one at least.

    Source: the sampling of transformers' video processor.
    """
    count = min(total, max(1, int(total / rate * fps)))
    return [i * total // count for i in range(count)]


def from_file(where: str, data: bytes, rule: Rule) -> Media:
    """A video from the bytes of a file; MediaError if PyAV is missing or the file is no video or damaged."""
    try:
        import av
    except ImportError as e:
        raise MediaError(f"{where}: video files need PyAV: pip install 'kiln[video]'; or send frames") from e
    try:
        rate, total, size = _facts(where, av, data)
        fit = rule.fit(*size, rule.frame_limit)
        indices = chosen(total, rate, rule.fps)
        if len(indices) > MAX_FRAMES:
            raise MediaError(f"{where}: {len(indices):,} frames at {rule.fps:g} a second, at most {MAX_FRAMES:,}")
        frames = list(_decoded(where, av, data, indices, fit))
    except av.FFmpegError as e:
        raise MediaError(f"{where}: cannot be read as a video: {e.strerror}") from e
    if len(frames) < len(indices):
        raise MediaError(f"{where}: is cut short: {len(frames)} of {len(indices)} frames could be decoded")
    return clip(where, frames, [i / rate for i in indices], rule, size)


def _facts(where: str, av: Any, data: bytes) -> tuple[float, int, tuple[int, int]]:
    """Frames a second, frames in all (counted where the file does not state them), and (width, height)."""
    with av.open(io.BytesIO(data)) as container:
        if not container.streams.video:
            raise MediaError(f"{where}: has no video stream")
        stream = container.streams.video[0]
        if not stream.average_rate:
            raise MediaError(f"{where}: states no frame rate; send frames with their times")
        total = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        if not total:
            raise MediaError(f"{where}: has no frames")
        size = (stream.width, stream.height)
        if not 0 < size[0] * size[1] <= MAX_PIXELS:
            raise MediaError(f"{where}: frames of {size[0]} x {size[1]}, expected 1 to {MAX_PIXELS:,} pixels")
        return float(stream.average_rate), total, size


def _decoded(where: str, av: Any, data: bytes, indices: list[int], fit: Fit) -> Iterator[Image.Image]:
    wanted, last = set(indices), indices[-1]
    with av.open(io.BytesIO(data)) as container:
        for i, frame in enumerate(container.decode(video=0)):
            if i in wanted:
                yield resized(f"{where} frame {i}", frame.to_image(), fit)
            if i >= last:
                return
