"""Writes a safetensors file front to back from a list of names, dtypes and shapes and a stream of bytes."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from convert.demo.inventory import TensorSpec


def header(specs: Sequence[TensorSpec]) -> bytes:
    """Length and JSON header, padded with spaces to a multiple of 8, for tensors stored in the order of `specs`."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.nbytes
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path, specs: Sequence[TensorSpec], payloads: Iterable[Iterable[memoryview]], advance: Callable[[int], object]
) -> None:
    """Writes `path` under a temporary name and renames it when complete; calls `advance` with every count of bytes."""
    part = path.with_name(path.name + ".part")
    with part.open("wb", buffering=0) as out:
        _write(out.fileno(), memoryview(header(specs)))
        for spec, pieces in zip(specs, payloads, strict=True):
            written = 0
            for piece in pieces:
                _write(out.fileno(), piece)
                written += len(piece)
                advance(len(piece))
            assert written == spec.nbytes, f"{spec.name}: {written} bytes for {spec.nbytes}"
    part.replace(path)


def write_text(path: Path, text: str) -> None:
    """Writes `path` as UTF-8 under a temporary name and renames it."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(text.encode())
    part.replace(path)


def _write(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]
