"""Grammars of answers: whatever the model prefers, what it may say is what was asked for."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from runtime_min.grammar import Constraint, vocabulary
from runtime_min.serve.errors import ApiError
from runtime_min.serve.fields import ChatFields, read
from runtime_min.serve.grammar import Grammars
from runtime_min.text import Tokenizer
from runtime_min.text.parser import Call, Parser, Text

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["c", "f"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.open(demo)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def fields(**more: Any) -> ChatFields:
    return read(
        ChatFields, json.dumps({"model": "kimi", "messages": [{"role": "user", "content": "x"}], **more}).encode()
    )


def wandered(tokenizer: Tokenizer, compiled: str, seed: int) -> list[int]:
    """An answer by chance: any token that the mask allows, ends of strings and of text often enough to get there."""
    generator = random.Random(seed)
    constraint = Constraint(compiled, vocabulary(tokenizer))
    likely = {*tokenizer.encode_ordinary('"}]'), *tokenizer.vocabulary.specials.values()}
    ids: list[int] = []
    while not (ids and ids[-1] in tokenizer.stop_ids):
        mask = constraint.mask(ids)
        bits = (mask[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.flatten()[: tokenizer.vocab_size].nonzero().flatten().tolist()
        assert allowed and len(ids) < 3000
        ends = [i for i in allowed if i in likely]
        ids.append(generator.choice(ends if ends and generator.random() < 0.3 else allowed))
    return ids


def read_back(tokenizer: Tokenizer, ids: list[int], inside: bool) -> tuple[str, list[Call]]:
    parser = Parser(tokenizer, reasoning=inside, tools=("weather", "time"))
    parts = [p for i in ids if i not in tokenizer.stop_ids for p in parser.feed(i)] + parser.finish(cut=False)
    assert parser.unreadable == 0
    content = "".join(p.text for p in parts if isinstance(p, Text) and p.channel == "content")
    return content, [p for p in parts if isinstance(p, Call)]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_that_must_be_made(
    tokenizer: Tokenizer, grammars: Grammars, choice: Any, seed: int, inside: bool
) -> None:
    compiled = grammars.of(fields(tools=TOOLS, tool_choice=choice), inside)
    assert compiled is not None
    content, calls = read_back(tokenizer, wandered(tokenizer, compiled, seed), inside)
    assert content == "" and calls
    for call in calls:
        schema = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}[call.name]  # type: ignore[index]
        jsonschema.validate(json.loads(call.arguments), schema)
    if choice is NAMED:
        assert [c.name for c in calls] == ["weather"]


@pytest.mark.parametrize("seed", range(8))
def test_json_of_a_schema(tokenizer: Tokenizer, grammars: Grammars, seed: int) -> None:
    compiled = grammars.of(fields(response_format=JSON), inside=True)
    assert compiled is not None
    content, calls = read_back(tokenizer, wandered(tokenizer, compiled, seed), inside=True)
    jsonschema.validate(json.loads(content), SCHEMA)
    assert not calls


@pytest.mark.parametrize("seed", range(4))
def test_json_or_calls(tokenizer: Tokenizer, grammars: Grammars, seed: int) -> None:
    compiled = grammars.of(fields(response_format={"type": "json_object"}, tools=TOOLS), inside=False)
    assert compiled is not None
    content, calls = read_back(tokenizer, wandered(tokenizer, compiled, seed), inside=False)
    assert bool(content) != bool(calls) and (calls or isinstance(json.loads(content), dict))


@pytest.mark.parametrize("seed", range(4))
def test_at_most_one_call(tokenizer: Tokenizer, grammars: Grammars, seed: int) -> None:
    for more in ({}, {"tool_choice": "required"}):
        compiled = grammars.of(fields(tools=TOOLS, parallel_tool_calls=False, **more), inside=False)
        assert compiled is not None
        _, calls = read_back(tokenizer, wandered(tokenizer, compiled, seed), inside=False)
        assert len(calls) == 1 if more else len(calls) <= 1


def test_what_needs_none(grammars: Grammars) -> None:
    for free in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {"response_format": {"type": "text"}}):
        assert grammars.of(fields(**free), inside=True) is None
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
    assert grammars.of(fields(tools=strict), inside=True) is not None


def test_a_schema_of_which_no_grammar_can_be_made(grammars: Grammars) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    with pytest.raises(ApiError, match="response_format: no grammar"):
        grammars.of(fields(response_format=bad), inside=False)


def test_in_the_server(bench: Any, tokenizer: Tokenizer) -> None:
    with bench() as b:
        refused = b.chat(tools=TOOLS, tool_choice="required")
        assert refused.status_code == 400 and "kiln[grammar]" in refused.text
    with bench(grammars=Grammars(tokenizer)) as b:
        assert b.chat(tools=TOOLS, tool_choice="required").status_code == 200
        assert b.engine.requests[-1].grammar
        assert b.chat(response_format=JSON, ignore_eos=True).status_code == 400
        assert b.chat(tools=TOOLS).status_code == 200 and b.engine.requests[-1].grammar is None


def test_masks_behind_drafted_tokens_are_those_of_the_text_with_them(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Whatever was drafted, allowed, forbidden or past the end, and nothing of it stays."""
    compiled = grammars.of(fields(response_format=JSON), False)
    known, r = vocabulary(tokenizer), random.Random(4)
    for seed in range(4):
        ids = wandered(tokenizer, compiled, seed)
        constraint, at = Constraint(compiled, known), 0
        while at < len(ids):
            for count in range(6):
                drafted = ids[at : at + count]
                want = Constraint(compiled, known).mask(ids[: at + count])
                assert torch.equal(constraint.behind(ids[:at], drafted), want)
            wrong = [*ids[at : at + 1], tokenizer.special("<|im_user|>"), *ids[at + 1 : at + 3]]
            allowed = Constraint(compiled, known).mask(ids[: at + 1])
            assert torch.equal(constraint.behind(ids[:at], wrong), allowed)
            assert torch.equal(constraint.mask(ids[:at]), Constraint(compiled, known).mask(ids[:at]))
            at += r.randint(1, 5)
