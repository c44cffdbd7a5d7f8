"""What a conversion may need, and what it did."""

from dataclasses import dataclass, field
from pathlib import Path

BASE_MEMORY = 1 << 30
PIECE_BYTES = 256 << 20
PIECES = 2


def peak_memory(workers: int) -> int:
    """The bound a run keeps: two pieces of 256 MiB per worker, and 1 GiB for everything else."""
    return BASE_MEMORY + workers * PIECES * PIECE_BYTES


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did. Seconds are summed over threads: `core` is processor time, `wall` includes waiting."""

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
    already_there: bool = False
