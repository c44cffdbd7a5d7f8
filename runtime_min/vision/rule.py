"""The released preprocessor's rule: how large a picture becomes, and what its pixels are measured in."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from specs import manifest
from specs.errors import InputError

FILE = "preprocessor_config.json"
# Fields with one supported value: what another would mean is not known.
FIXED: dict[str, Any] = {
    "fixed_output_tokens": None,
    "in_patch_limit_video": None,
    "max_num_frames_each_video": None,
    "timestamp_mode": "hh:mm:ss.fff",
}


class MediaError(InputError):
    """A picture or clip that cannot be taken. The message begins with where in the request it was."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Sizes in pixels: what a frame is resized to, and what it is padded to on the right and at the bottom."""

    width: int
    height: int
    padded_width: int
    padded_height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """preprocessor_config.json. Limits count patches: of a picture, of a frame of a clip, along one side."""

    patch: int
    merge: int
    limit: int
    frame_limit: int
    side_limit: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fps: float
    chunk: int

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The rule of a checkpoint or artifact; MediaError for a missing field or a value that is not supported."""
        path = folder / FILE
        if not path.is_file():
            raise MediaError(f"{path}: not there, so pictures cannot be prepared; convert from a checkpoint with it")
        found = manifest.read_json(path)
        config = found.get("media_proc_cfg", found)
        problems = [
            f"{path}: {k}: found {config.get(k)!r}, only {v!r} is supported"
            for k, v in FIXED.items()
            if config.get(k) != v
        ]

        def number(name: str, kind: type[int] | type[float] = int) -> Any:
            value = config.get(name)
            if isinstance(value, bool) or not isinstance(value, int | kind) or value <= 0:
                problems.append(f"{path}: {name}: found {value!r}, expected a positive {kind.__name__}")
                return 1
            return value

        def triple(name: str, low: float) -> tuple[float, ...]:
            value = config.get(name)
            good = isinstance(value, list) and len(value) == 3 and all(isinstance(v, int | float) for v in value)
            if not good or min(value) < low:
                problems.append(f"{path}: {name}: found {value!r}, expected three numbers from {low:g} up")
                return (1.0, 1.0, 1.0)
            return tuple(map(float, value))

        rule = cls(
            patch=number("patch_size"),
            merge=number("merge_kernel_size"),
            limit=number("in_patch_limit"),
            frame_limit=number("in_patch_limit_each_frame"),
            side_limit=number("patch_limit_on_one_side"),
            mean=triple("image_mean", 0.0),
            std=triple("image_std", 1e-6),
            fps=number("sample_fps", float),
            chunk=number("temporal_merge_kernel_size"),
        )
        if problems:
            raise MediaError(problems)
        return rule

    def fit(self, width: int, height: int, limit: int) -> Fit:
        """What becomes of width x height pixels if a frame may have `limit` patches: never enlarged.

        Padding comes after the limit, so the padded grid may exceed it. Source: the released preprocessor.
        """
        side = self.side_limit * self.patch
        patches = max(1, width // self.patch) * max(1, height // self.patch)
        scale = min(1.0, math.sqrt(limit / patches), side / width, side / height)
        w, h = (min(max(1, int(size * scale)), side) for size in (width, height))
        cell = self.patch * self.merge
        return Fit(w, h, -(-w // cell) * cell, -(-h // cell) * cell)

    def grid(self, fit: Fit) -> tuple[int, int]:
        """Rows and columns of patches."""
        return fit.padded_height // self.patch, fit.padded_width // self.patch
