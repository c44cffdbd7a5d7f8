"""What every bench leaves: a page for people and the same in JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def page(title: str, facts: Mapping[str, Any], lines: Sequence[str], note: str = "") -> str:
    """Markdown: the title, where and with what it was measured, and the lines of a table."""
    told = ", ".join(f"{k} {v}" for k, v in facts.items())
    about = f"{told}.\n\n{note}" if note else f"{told}."
    return "\n".join([f"# {title}\n\n{about}\n", *lines, ""])


def write(result: Path, text: str, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """NAME.md and NAME.json of a bench."""
    result.with_suffix(".md").write_text(text)
    result.with_suffix(".json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n")
