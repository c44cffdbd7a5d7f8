"""What drafts bring on given prompts: acceptance by its definitions, the cost of drafting and verifying, the speed-up.

All prompts run three times on one engine: once for their pages of the cache, once without drafts, once with them.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime_min.artifact import Artifact
from runtime_min.engine import Engine, Result
from runtime_min.prompt import encoded, user_message
from runtime_min.request import Request
from runtime_min.sample import Sampling
from runtime_min.speculate.figures import Acceptance
from runtime_min.tasks import stops_of
from runtime_min.text import Tokenizer
from specs.errors import InputError

DEFINITIONS = (
    "mean accept length = 1 + accepted / drafts: tokens of a step, the target's own one among them (vLLM, LMDeploy)",
    "draft acceptance rate = accepted / drafted tokens, of the unbroken run only; a tree drafts all of its nodes",
    "per position = accepted_at[i] / drafts; conditional = of those that accepted the one before",
    "drafts = steps of requests that had drafts; the token that a prompt itself gives is in none of them",
    "a run that a stop cuts counts up to the stop; sums over all requests, no means of means",
)


class PromptsError(InputError):
    """A file of prompts that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """plain, drafted: tokens a second of all requests together, after the prompts' pages were cached; bigrams: distinct
    pairs of neighbouring tokens in the answers, of all such pairs; same: answers that are those of plain decoding."""

    acceptance: Acceptance
    prompts: int
    tokens: int
    plain: float
    drafted: float
    bigrams: tuple[int, int]
    same: int

    @property
    def speedup(self) -> float:
        return self.drafted / self.plain

    def facts(self) -> dict[str, Any]:
        distinct, pairs = self.bigrams
        return self.acceptance.facts() | {
            "prompts": self.prompts, "tokens": self.tokens, "plain_tokens_s": self.plain,
            "drafted_tokens_s": self.drafted, "speedup": self.speedup, "distinct_bigrams": distinct, "bigrams": pairs,
            "same_as_plain": self.same, "alarms": self.alarms(), "definitions": list(DEFINITIONS),
        }  # fmt: skip

    def alarms(self) -> list[str]:
        """What makes the figures doubtful."""
        distinct, pairs = self.bigrams
        out = [f"the acceptance rate is exactly {r:.0%}" for r in (0.0, 1.0) if self.acceptance.rate == r]
        if pairs and distinct < pairs / 4:
            out.append("the answers repeat themselves, which is easy to guess")
        return out


def prompts_of(file: Path, artifact: Artifact) -> list[tuple[int, ...]]:
    """One prompt a line: a user's message, or token ids as a JSON list."""
    folder = artifact.path
    tokenizer = Tokenizer.open(folder) if (folder / "tiktoken.model").exists() else None
    out = []
    for i, line in enumerate(file.read_text().splitlines(), 1):
        if line.startswith("["):
            try:
                out.append(tuple(int(x) for x in json.loads(line)))
            except (ValueError, TypeError) as e:
                raise PromptsError(f"{file}:{i}: expected a list of token ids: {e}") from e
        elif line.strip():
            if tokenizer is None:
                raise PromptsError(f"{file}:{i}: text, but {folder} has no tiktoken.model; give token ids")
            asked = {"messages": [user_message(line, (), ())]}
            out.append(tuple(encoded(artifact, tokenizer, asked, None).ids))
    if not out:
        raise PromptsError(f"{file}: is empty, expected a prompt on each line")
    return out


def measured(
    engine: Engine, artifact: Artifact, prompts: Sequence[tuple[int, ...]], sampling: Sampling, tokens: int
) -> Measured:
    """Raises InputError for an engine without a draft, and for prompts that do not fit."""
    before = engine.stats.drafts
    if before is None:
        raise PromptsError("this engine has no draft; start it with one")
    tokenizer = Tokenizer.open(artifact.path) if (artifact.path / "tiktoken.model").exists() else None
    stops = stops_of(tokenizer, artifact)
    asked = [Request(prompt=p, max_tokens=tokens, sampling=sampling, stops=stops) for p in prompts]
    engine.generate([replace(r, max_tokens=2) for r in asked])
    plain, slow = _timed(engine, [replace(r, draft=False) for r in asked])
    before = engine.stats.drafts or before
    drafted, fast = _timed(engine, asked)
    found = (engine.stats.drafts or before).since(before)
    pairs = [pair for r in drafted for pair in zip(r.ids, r.ids[1:], strict=False)]
    return Measured(
        acceptance=found, prompts=len(prompts), tokens=sum(len(r.ids) for r in drafted), plain=slow, drafted=fast,
        bigrams=(len(set(pairs)), len(pairs)), same=sum(a.ids == b.ids for a, b in zip(plain, drafted, strict=True)),
    )  # fmt: skip


def _timed(engine: Engine, asked: Sequence[Request]) -> tuple[list[Result], float]:
    begin = time.perf_counter()
    results = engine.generate(asked)
    seconds = time.perf_counter() - begin
    wrong = next((r.error for r in results if r.error is not None), None)
    if wrong is not None:
        raise PromptsError(wrong)
    return results, sum(len(r.ids) for r in results) / seconds


def table(m: Measured, setting: dict[str, Any]) -> str:
    """For people."""
    a, each = m.acceptance, max(m.acceptance.steps, 1)
    places = " / ".join(f"{100 * r:.1f}" for r in a.conditional) or "none"
    lines = [
        ", ".join(f"{k} {v}" for k, v in setting.items()),
        a.line(),
        f"conditional {places}",
        f"draft {a.draft_ms / each:.2f} ms a step, target {a.verify_ms / each:.2f} ms",
        f"{m.drafted:.1f} tokens/s with drafts, {m.plain:.1f} without: {m.speedup:.2f} times",
        f"{m.prompts} prompts, {m.tokens} tokens, {m.same} answers as without drafts; {m.bigrams[0]} distinct "
        f"bigrams of {m.bigrams[1]}",
        *(f"ALARM: {alarm}" for alarm in m.alarms()),
        "",
        *DEFINITIONS,
    ]
    return "\n".join(lines)
