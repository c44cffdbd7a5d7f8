"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class Stops:
    """Passes text on up to the first of the stop strings, holding back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [s for s in stops if s]
        self.found: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is safe to show now; nothing after a stop was found."""
        if self.found is not None:
            return ""
        text = self._held + text
        # The one that is complete first, so that pieces do not matter; of those that end together the longest.
        found = min(((at + len(s), at, s) for s in self.stops if (at := text.find(s)) >= 0), default=None)
        if found is not None:
            self.found, self._held = found[2], ""
            return text[: found[1]]
        keep = max((self._overlap(text, s) for s in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` begins with."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
