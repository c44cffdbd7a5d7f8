"""What a conversion may need, and what it did."""

import os
import resource
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

BASE_MEMORY = 1 << 30
PIECE_BYTES = 256 << 20
PIECES = 2
SLACK_DISK = 64 << 20


def peak_memory(workers: int) -> int:
    """The bound a run keeps: two pieces of 256 MiB per worker, and 1 GiB for everything else."""
    return BASE_MEMORY + workers * PIECES * PIECE_BYTES


def disk_problems(out: Path, nbytes: int) -> list[str]:
    """What to say if the disk of `out` has no room for so many more bytes and a little slack; nothing if it has."""
    need, have = nbytes + SLACK_DISK, shutil.disk_usage(out).free
    if have >= need:
        return []
    return [
        f"disk: {out} needs {need / 1e9:.2f} GB more, {have / 1e9:.2f} GB are free; free "
        f"{(need - have) / 1e9:.2f} GB or choose another --out"
    ]


def available_memory() -> int:
    """Bytes that new processes may take, as the kernel estimates it."""
    try:
        with open("/proc/meminfo") as f:
            fields = dict(line.split(":", 1) for line in f)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did. Seconds are summed over threads: `core` is processor time, `wall` includes waiting.

    waiting: jobs that other processes of the same conversion are still to finish; with any there is no artifact yet.
    """

    out: Path
    seconds: float
    bytes_read: int = 0
    bytes_written: int = 0
    files: int = 0
    resumed_jobs: int = 0
    peak_bytes: int = 0
    wall: dict[str, float] = field(default_factory=dict)
    core: dict[str, float] = field(default_factory=dict)
    logical: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    waiting: int = 0
    already_there: bool = False


def peak_now() -> int:
    """Peak resident bytes of this process. The kernel's own mark: getrusage would count the parent's before exec."""
    try:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
