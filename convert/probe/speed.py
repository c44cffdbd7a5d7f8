"""How fast the disk under some files reads: a short measurement that the page cache and holes cannot fake."""

import os
import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from convert.readers.files import hint

BLOCK = 8 << 20
BLOCKS = 48
TRIED = 4 * BLOCKS
READERS = 4
SECONDS = 2.0
LEAST = 64 << 20
# One NVMe drive. Only used where nothing could be measured, and then said.
ASSUMED = 3e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Bytes a second, and how it was found. measured is False if the number is an assumption."""

    bytes_per_second: float
    measured: bool
    how: str


def assumed(why: str) -> Speed:
    how = f"{why}; {ASSUMED / 1e9:.0f} GB/s (one NVMe drive) assumed"
    return Speed(bytes_per_second=ASSUMED, measured=False, how=how)


def disk_speed(files: Iterable[Path]) -> Speed:
    """Reads up to 48 blocks of 8 MiB at places spread over `files`, four at a time, for two seconds at most.

    The pages are dropped from the page cache before they are read. Blocks with holes are passed over: nothing is read
    for them.
    """
    places = [(f, at) for f in sorted(files) for at in range(0, f.stat().st_size - BLOCK + 1, BLOCK)]
    random.Random(0).shuffle(places)
    if len(places) * BLOCK < LEAST:
        return assumed("disk not measured: the files are too small")
    held: list[tuple[Path, int]] = []
    for file, at in places[:TRIED]:
        if len(held) < BLOCKS and is_data(file, at):
            held.append((file, at))
    if len(held) * BLOCK < LEAST:
        return assumed("disk not measured: the files are mostly holes, which read from nowhere")
    begin = time.perf_counter()
    stop = begin + SECONDS
    with ThreadPoolExecutor(READERS) as pool:
        done = sum([*pool.map(partial(_read, stop), held)])
    speed = done / (time.perf_counter() - begin)
    how = f"{speed / 1e9:.2f} GB/s, measured by reading {done >> 20} MiB"
    return Speed(bytes_per_second=speed, measured=True, how=how)


def is_data(file: Path, at: int) -> bool:
    """Whether a block is stored at all; where the file system cannot tell, it is."""
    with file.open("rb") as f:
        try:
            return os.lseek(f.fileno(), at, os.SEEK_DATA) == at and os.lseek(f.fileno(), at, os.SEEK_HOLE) >= at + BLOCK
        except (OSError, AttributeError):
            return file.stat().st_blocks * 512 >= file.stat().st_size


def _read(stop: float, place: tuple[Path, int]) -> int:
    """Bytes read of the block at a place; 0 when the time is over."""
    file, at = place
    if time.perf_counter() > stop:
        return 0
    with file.open("rb", buffering=0) as f:
        hint(f.fileno(), at, BLOCK, "DONTNEED")
        f.seek(at)
        done = 0
        while done < BLOCK:
            data = f.read(BLOCK - done)
            if not data:
                break
            done += len(data)
    return done
