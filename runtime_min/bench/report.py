"""What every bench leaves: a page for people and the same in JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specs.errors import InputError


class PlotError(InputError):
    """A drawing was asked for, and there is nothing to draw with."""


def page(title: str, facts: Mapping[str, Any], lines: Sequence[str], note: str = "") -> str:
    """Markdown: the title, where and with what it was measured, and the lines of a table."""
    told = ", ".join(f"{k} {v}" for k, v in facts.items())
    about = f"{told}.\n\n{note}" if note else f"{told}."
    return "\n".join([f"# {title}\n\n{about}\n", *lines, ""])


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 0) -> list[str]:
    """The lines of a table whose first `words` columns are words and the others numbers."""
    bounds = "|---" * words + "|--:" * (len(head) - words) + "|"
    return ["| " + " | ".join(head) + " |", bounds, *("| " + " | ".join(row) + " |" for row in rows)]


def write(result: Path, text: str, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """NAME.md and NAME.json of a bench."""
    result.with_suffix(".md").write_text(text)
    result.with_suffix(".json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")


@contextmanager
def figure(out: Path, columns: int = 1) -> Iterator[Any]:
    """Axes side by side, an array of them if there are several; afterwards `out` is their drawing (SVG), the same bytes
    for the same data."""
    try:
        import matplotlib
    except ImportError as e:
        raise PlotError(f"{out}: {e}; pip install matplotlib") from e
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kiln"
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(1, columns, figsize=(8 if columns == 1 else 6 * columns, 5), layout="tight")
    yield axes
    drawing.savefig(out, metadata={"Date": None})
    pyplot.close(drawing)
