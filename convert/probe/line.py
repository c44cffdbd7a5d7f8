"""One answer of probe or doctor."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from specs.errors import InputError

Verdict = Literal["go", "warn", "no-go"]
SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What was asked, what was found, and what to do about it; facts are the same in numbers."""

    name: str
    verdict: Verdict
    found: str
    do: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("name", "verdict", "found", "do", "facts")}


def refusal(name: str, error: InputError, do: str) -> Line:
    """A no-go with the first problems of an error; all of them are in the facts."""
    more = f" (and {len(error.problems) - SHOWN} more)" if len(error.problems) > SHOWN else ""
    found = "; ".join(error.problems[:SHOWN]) + more
    return Line(name=name, verdict="no-go", found=found, do=do, facts={"problems": list(error.problems)})


def unasked(names: Iterable[str], because: str) -> list[Line]:
    """Lines that cannot be answered before another one is."""
    facts = {"after": because}
    return [Line(name=n, verdict="no-go", found="not known", do=f"settle {because} first", facts=facts) for n in names]


def go(lines: Iterable[Line]) -> bool:
    """No line says no-go; warnings do not stop anyone."""
    return all(line.verdict != "no-go" for line in lines)
