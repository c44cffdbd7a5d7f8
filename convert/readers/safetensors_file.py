"""One safetensors file's header, read strictly: what a lenient reader passes over is an error here."""

import os
from collections.abc import Mapping
from pathlib import Path

from convert.readers.source import TensorInfo
from convert.readers.strict_json import brief, parse_object
from specs.errors import SourceError
from specs.storage import ITEM_BYTES, nbytes

MAX_HEADER = 100 << 20
POINTER = b"version https://git-lfs"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """name -> TensorInfo of one file; SourceError says what is wrong with it."""
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    try:
        if path.exists() and not path.is_file():
            raise SourceError(f"{path}: is not a file; a checkpoint folder holds safetensors files")
        with path.open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            head = f.read(8)
            raw = f.read(header_length(str(path), head, size))
    except OSError as e:
        raise SourceError(f"{path}: cannot be read: {e.strerror or e}") from e
    return parse_header(str(path), raw, size)


def header_length(where: str, head: bytes, size: int) -> int:
    """Bytes of JSON after the first eight of a file of `size` bytes."""
    if len(head) < 8:
        raise SourceError(f"{where}: {size} bytes, too short for a safetensors file; download it again")
    if head == POINTER[:8]:
        raise SourceError(
            f"{where}: is a git-lfs pointer, not the file itself; run `git lfs pull` or download it again"
        )
    length = int.from_bytes(head, "little")
    if length > min(MAX_HEADER, size - 8):
        raise SourceError(f"{where}: header of {length} bytes in a file of {size}; truncated or not a safetensors file")
    return length


def parse_header(where: str, raw: bytes, size: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Header bytes and the file's size -> (tensors, metadata), every offset checked."""
    parsed = parse_object(f"{where}: header", raw)
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise SourceError(f"{where}: __metadata__ is not a map of strings")
    base = 8 + len(raw)
    tensors = {name: _entry(where, name, entry, base) for name, entry in parsed.items()}
    _tiling(where, tensors, base, size)
    return tensors, metadata


def _entry(where: str, name: str, entry: object, base: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise SourceError(f"{where}: {name}: entry {brief(entry)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise SourceError(f"{where}: {name}: dtype {brief(dtype)}, expected one of {', '.join(ITEM_BYTES)}")
    for label, values in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
            raise SourceError(f"{where}: {name}: {label} {brief(values)}, expected non-negative integers")
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes(tuple(shape), dtype):
        raise SourceError(f"{where}: {name}: data_offsets {offsets} do not hold {dtype} {shape}")
    return TensorInfo(dtype, tuple(shape), where, base + offsets[0], base + offsets[1])


def _tiling(where: str, tensors: Mapping[str, TensorInfo], base: int, size: int) -> None:
    """Tensors follow each other without holes or overlaps, from the header to the file's last byte."""
    at = base
    for name, info in sorted(tensors.items(), key=lambda t: (t[1].start, t[1].stop)):
        if info.start != at:
            kind = (
                "overlaps the tensor before it"
                if info.start < at
                else f"leaves a hole of {info.start - at} bytes before it"
            )
            raise SourceError(f"{where}: {name}: starts at byte {info.start}, {kind}")
        at = info.stop
    if size != at:
        state = (
            f"truncated, {at - size} bytes are missing" if size < at else f"{size - at} bytes follow the last tensor"
        )
        raise SourceError(f"{where}: {state} (file {size}, header says {at}); download it again")
