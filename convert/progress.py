"""A bar with bytes/s and time left on a terminal; a quiet line every ten seconds elsewhere."""

import sys
import threading
import time
from types import TracebackType

from tqdm import tqdm

QUIET_SECONDS = 10.0


class Progress:
    """Counts bytes from any thread; writes to stderr only."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.done = label, max(total, 1), 0
        self._lock = threading.Lock()
        self._begin = self._spoken = time.monotonic()
        self._bar = (
            tqdm(total=total, desc=label, unit="B", unit_scale=True, file=sys.stderr) if sys.stderr.isatty() else None
        )

    def __call__(self, n: int) -> None:
        with self._lock:
            self.done += n
            if self._bar is not None:
                self._bar.update(n)
            elif time.monotonic() - self._spoken > QUIET_SECONDS:
                self._spoken = time.monotonic()
                self._line()

    def expect(self, total: int) -> None:
        """The total, where it is known only later."""
        self.total = max(total, 1)
        if self._bar is not None:
            self._bar.total = total

    def _line(self) -> None:
        seconds = time.monotonic() - self._begin
        rate = self.done / max(seconds, 1e-9)
        left = max(0, self.total - self.done) / max(rate, 1e-9)
        sys.stderr.write(
            f"{self.label}: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, "
            f"{left:.0f} s left\n"
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
