"""Wall and core seconds by phase, summed over threads."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """`with clock("read"): ...` adds to the phase's wall time and to the thread's own core time."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.core: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        wall, core = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self.wall[phase] += time.perf_counter() - wall
                self.core[phase] += time.thread_time() - core

    def add(self, other: tuple[Mapping[str, float], Mapping[str, float]]) -> None:
        """Wall and core seconds that another process spent."""
        with self._lock:
            for mine, theirs in zip((self.wall, self.core), other, strict=True):
                for phase, seconds in theirs.items():
                    mine[phase] += seconds
