"""What only the running model can show: perplexity of a text, and how well it calls tools."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_min.accept.report import Finding
from runtime_min.artifact import Artifact
from runtime_min.bench import speculate
from runtime_min.engine import Engine
from runtime_min.messages import Event
from runtime_min.request import Request
from runtime_min.sample import Sampling
from runtime_min.serve import jobs
from runtime_min.serve.errors import ApiError
from runtime_min.serve.fields import ChatFields, read
from runtime_min.serve.jobs import Job, Served
from runtime_min.text.parser import Call
from specs.errors import InputError

WINDOW = 4096
# Tokens of an answer that drafts are measured on, at most.
ANSWER = 256


class AcceptError(InputError):
    """A file of the day-one kit that cannot be used."""


def perplexity(engine: Engine, served: Served, text: Path, low: float, high: float) -> Finding:
    """exp of the mean negative log-probability of every token after the first of its window, in windows of WINDOW
    tokens that do not overlap. Passes inside low..high."""
    ids = served.tokenizer.encode_ordinary(text.read_text())
    size = min(WINDOW, engine.bounds.context - 1, engine.bounds.cache_tokens - 1)
    windows = [w for i in range(0, len(ids), size) if len(w := tuple(ids[i : i + size])) > 1]
    if not windows:
        raise AcceptError(f"{text}: has {len(ids)} tokens, expected at least 2")
    how = Sampling(logprobs=0)
    results = engine.generate([Request(prompt=w, max_tokens=1, sampling=how, scored=True) for w in windows])
    wrong = next((r.error for r in results if r.error is not None), None)
    if wrong is not None:
        return Finding(name="perplexity", verdict="fail", said=wrong)
    scores = [p.logprob for r in results for p in r.scored]
    value = math.exp(-math.fsum(scores) / len(scores))
    facts = {"perplexity": value, "tokens": len(scores), "low": low, "high": high, "window": size, "text": str(text)}
    said = f"{value:.4f} over {len(scores)} tokens, expected {low:g} to {high:g}"
    return Finding(name="perplexity", verdict="pass" if low <= value <= high else "fail", said=said, facts=facts)


def drafts(engine: Engine, artifact: Artifact, prompts: Path, least: float) -> Finding:
    """Greedy answers to the prompts with drafts and without. Passes with a mean accept length of at least `least`."""
    found = speculate.measured(engine, artifact, speculate.prompts_of(prompts, artifact), Sampling(), ANSWER)
    good = found.acceptance.length >= least
    said = f"{found.acceptance.line()}, expected a length of {least:g}; {found.speedup:.2f} times plain decoding"
    return Finding(name="drafts", verdict="pass" if good else "fail", said=said, facts=found.facts())


@dataclass(slots=True)
class Tally:
    """Requests by whether a call was expected and made; and of the calls that were made, how many are right."""

    hits: int = 0
    false: int = 0
    missed: int = 0
    quiet: int = 0
    calls: int = 0
    valid: int = 0
    named: int = 0

    @property
    def f1(self) -> float:
        """Of the decision to call: 1 if nothing was to be decided wrongly."""
        wrong = self.false + self.missed
        return 1.0 if not self.hits + wrong else 2 * self.hits / (2 * self.hits + wrong)

    @property
    def schema(self) -> float:
        return 1.0 if not self.calls else self.valid / self.calls


def tool_calls(engine: Engine, served: Served, file: Path, least_f1: float, least_schema: float) -> Finding:
    """Runs every line of `file`, a request of /v1/chat/completions with `expected_calls`: the names of the tools that
    should be called, [] for none. Passes if the decision to call has at least `least_f1`, and the share of calls whose
    arguments keep to their schema is at least `least_schema`."""
    asked = [
        _request(f"{file}:{i}", line, served) for i, line in enumerate(file.read_text().splitlines(), 1) if line.strip()
    ]
    if not asked:
        raise AcceptError(f"{file}: is empty, expected a request on each line")
    results = engine.generate([job.requests[0] for _, job, _ in asked])
    tally = Tally()
    for (fields, job, expected), result in zip(asked, results, strict=True):
        if result.error is not None:
            return Finding(name="tool calls", verdict="fail", said=result.error)
        assert result.finish is not None
        news = job.choices[0].take(Event(id=0, tokens=tuple(result.ids), finish=result.finish))
        _count(tally, fields, [p for p in news.parts if isinstance(p, Call)], expected)
    good = tally.f1 >= least_f1 and tally.schema >= least_schema
    facts = {
        "requests": len(asked), "f1": tally.f1, "schema": tally.schema, "least_f1": least_f1,
        "least_schema": least_schema, "called_rightly": tally.hits, "called_wrongly": tally.false,
        "not_called": tally.missed, "rightly_not_called": tally.quiet, "calls": tally.calls,
        "requests_with_the_expected_names": tally.named,
    }  # fmt: skip
    said = f"F1 {tally.f1:.3f} of {least_f1:g}, schema {tally.schema:.3f} of {least_schema:g}, {len(asked)} requests"
    return Finding(name="tool calls", verdict="pass" if good else "fail", said=said, facts=facts)


def _request(where: str, line: str, served: Served) -> tuple[ChatFields, Job, list[str]]:
    try:
        body = json.loads(line)
        expected = body.pop("expected_calls")
        if not isinstance(expected, list) or not all(isinstance(name, str) for name in expected):
            raise TypeError(f"expected_calls: found {expected!r}, expected a list of names")
        fields = read(ChatFields, json.dumps({**body, "model": served.name}).encode())
        return fields, jobs.chat(served, fields), expected
    except KeyError as e:
        raise AcceptError(f"{where}: has no {e}") from e
    except (ValueError, TypeError, AttributeError, ApiError) as e:
        raise AcceptError(f"{where}: {e}") from e


def _count(tally: Tally, fields: ChatFields, calls: Sequence[Call], expected: Sequence[str]) -> None:
    schemas = {t.function.name: t.function.parameters or {} for t in fields.tools or ()}
    outcome = {(True, True): "hits", (False, True): "false", (True, False): "missed", (False, False): "quiet"}
    name = outcome[bool(expected), bool(calls)]
    setattr(tally, name, getattr(tally, name) + 1)
    tally.calls += len(calls)
    tally.valid += sum(_keeps_to(schemas.get(call.name), call.arguments) for call in calls)
    tally.named += sorted(c.name for c in calls) == sorted(expected)


def _keeps_to(schema: dict[str, Any] | None, arguments: str) -> bool:
    """Are the arguments JSON of this schema? None: of a tool that was not offered."""
    import jsonschema

    if schema is None:
        return False
    try:
        jsonschema.validate(json.loads(arguments), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
