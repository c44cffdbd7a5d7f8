"""Findings, and the report of them as Markdown and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. said: one line for people; facts: its numbers."""

    name: str
    verdict: Verdict
    said: str
    facts: dict[str, Any] = field(default_factory=dict)


def markdown(title: str, findings: Sequence[Finding]) -> str:
    """The report as a page."""
    rows = [f"| {f.name} | {f.verdict} | {f.said} |" for f in findings]
    details = [
        f"## {f.name}\n\n```json\n{json.dumps(f.facts, indent=2, ensure_ascii=False)}\n```\n"
        for f in findings
        if f.facts
    ]
    return "\n".join([f"# {title}", "", "| check | verdict | |", "|---|---|---|", *rows, "", *details])


def write(folder: Path, title: str, findings: Sequence[Finding]) -> tuple[Path, Path]:
    """accept.md and accept.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / "accept.md", folder / "accept.json"
    page.write_text(markdown(title, findings))
    data.write_text(json.dumps({"artifact": title, "findings": [asdict(f) for f in findings]}, indent=2) + "\n")
    return page, data
