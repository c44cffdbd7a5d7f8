"""Answers into reasoning, content and calls: at every token boundary, as recorded, and where models err."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from canitoolcall.checks import compare
from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy, split
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms, assert_equivalent
from canitoolcall.results import ParsedToolCall, ParseResult, Status
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_min.text import Piece, Tokenizer
from runtime_min.text.calls import called, renumbered
from runtime_min.text.parser import Call, Parser, Part, Text, begins_inside_reasoning
from runtime_min.text.stops import Stops

KIMI_K2 = [f for f in load_fixtures(families=["kimi"]) if "x-kimi-k2" in f.tags]
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
FULL = (
    "Two cities — 東京 🌸.</think>I look. "
    + SECTION.format(
        CALL.format("functions.get_weather:3", '{"city": "東京 \\" <|tool_call_end|> 🌸"}')
        + CALL.format("functions.get_time:4", "{}")
    )
    + " Done."
)
TOOLS = ("get_weather", "get_time")


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.open(demo)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_pieces([Piece(text, True)])


def joined(parts: Iterable[Part]) -> tuple[str, str, list[Call]]:
    reasoning = content = ""
    calls = []
    for part in parts:
        if isinstance(part, Call):
            calls.append(part)
        elif part.channel == "reasoning":
            reasoning += part.text
        else:
            content += part.text
    return reasoning, content, calls


def parsed(
    tokenizer: Tokenizer,
    groups: Iterable[Sequence[int]],
    *,
    reasoning: bool = True,
    tools: Sequence[str] | None = TOOLS,
    cut: bool = False,
    first_call: int = 0,
) -> tuple[str, str, list[Call]]:
    parser = Parser(tokenizer, reasoning=reasoning, tools=tools, first_call=first_call)
    parts = [part for group in groups for token in group for part in parser.feed(token)]
    return joined([*parts, *parser.finish(cut)])


def shown(tokenizer: Tokenizer, text: str, **how: object) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning, content, calls = parsed(tokenizer, [ids_of(tokenizer, text)], **how)  # type: ignore[arg-type]
    return reasoning, content, [(c.name, c.arguments) for c in calls]


def test_corpus_is_there() -> None:
    assert len(KIMI_K2) >= 25 and sum(f.truncated for f in KIMI_K2) >= 2


@pytest.mark.parametrize("case", KIMI_K2, ids=lambda f: f.id)
@pytest.mark.parametrize("strategy", DEFAULT_STRATEGIES, ids=lambda s: s.id)
def test_recorded_answers(tokenizer: Tokenizer, case: Fixture, strategy: ChunkStrategy) -> None:
    prompt = case.generation_prompt or ("<|im_assistant|>assistant<|im_middle|>" + ("<think>" if case.thinking else ""))
    inside = begins_inside_reasoning(tokenizer, ids_of(tokenizer, prompt))
    ids = ids_of(tokenizer, case.raw_output)
    tools = [t["function"]["name"] for t in case.tools]

    def result(groups: Iterable[Sequence[int]]) -> ParseResult:
        reasoning, content, calls = parsed(tokenizer, groups, reasoning=inside, tools=tools, cut=case.truncated)
        return ParseResult(
            content=content or None,
            reasoning_content=reasoning or None,
            tool_calls=tuple(ParsedToolCall(c.name, c.arguments) for c in calls),
        )

    special = set(tokenizer.vocabulary.specials.values())
    streamed = result(split(ids, strategy, special=special))
    assert_conforms(case, streamed)
    assert_equivalent(result([ids]), streamed)


def test_every_token_boundary_and_random_groups(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, FULL)
    whole = parsed(tokenizer, [ids], first_call=3)
    assert whole[:2] == ("Two cities — 東京 🌸.", "I look.  Done.")
    assert [(c.id, json.loads(c.arguments)) for c in whole[2]] == [
        ("functions.get_weather:3", {"city": '東京 " <|tool_call_end|> 🌸'}),
        ("functions.get_time:4", {}),
    ]
    for at in range(len(ids) + 1):
        assert parsed(tokenizer, [ids[:at], ids[at:]], first_call=3) == whole
    generator = random.Random(1)
    for _ in range(20):
        cuts = sorted(generator.sample(range(len(ids) + 1), 6))
        groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        assert parsed(tokenizer, groups, first_call=3) == whole


def test_what_is_shown_early_is_never_taken_back(tokenizer: Tokenizer) -> None:
    """Cut after any token, the parts so far are a beginning of the whole answer, with no replacement character but
    at the end, and no call that the whole answer lacks."""
    ids = ids_of(tokenizer, FULL)
    reasoning, content, calls = parsed(tokenizer, [ids])
    for at in range(len(ids)):
        some = parsed(tokenizer, [ids[:at]], cut=True)
        for early, late in ((some[0], reasoning), (some[1], content)):
            assert late.startswith(early.removesuffix("\ufffd"))
        assert some[2] == calls[: len(some[2])]


def test_a_section_ends_the_reasoning(tokenizer: Tokenizer) -> None:
    text = "hm " + SECTION.format(CALL.format("functions.get_time:0", "{}"))
    assert shown(tokenizer, text) == ("hm ", "", [("get_time", "{}")])


def test_empty_sections_noise_and_text_after(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, "a" + SECTION.format("") + "b", reasoning=False) == ("", "ab", [])
    noisy = SECTION.format(" x " + CALL.format("functions.get_time:0", "{}") + "\ny")
    assert shown(tokenizer, noisy + "z", reasoning=False) == ("", "z", [("get_time", "{}")])


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("functions.get_time:0", "get_time"),
        ("get_time:0", "get_time"),
        ("get_time", "get_time"),
        (" functions.get_time:0 ", "get_time"),
        ("functions.get_\ntime:12\n", "get_time"),
        ("functions.get_time", "get_time"),
        ("functions.get_time:", "get_time"),
        ("functions.f:1", "f:1"),
        ("functions.other:7", "other"),
        ("0", None),
        ("functions.:0", None),
        ("", None),
    ],
)
def test_unusual_ids(tokenizer: Tokenizer, said: str, name: str | None) -> None:
    assert called(said, (*TOOLS, "f:1")) == name
    text = SECTION.format(CALL.format(said, '{"a": 1}'))
    found = shown(tokenizer, text, reasoning=False, tools=(*TOOLS, "f:1"))
    # What no name can be read in is shown as it was written.
    assert found == (("", "", [(name, '{"a": 1}')]) if name else ("", f'{said}{{"a": 1}}', []))


def test_a_call_without_arguments_marker(tokenizer: Tokenizer) -> None:
    text = SECTION.format("<|tool_call_begin|>functions.get_time:0<|tool_call_end|>")
    assert shown(tokenizer, text, reasoning=False) == ("", "", [("get_time", "{}")])


def test_long_arguments(tokenizer: Tokenizer) -> None:
    value = json.dumps({"text": "lorem ipsum 🌸 " * 16_000})
    assert len(value.encode()) > 200_000
    text = SECTION.format(CALL.format("functions.get_time:0", value))
    assert shown(tokenizer, text, reasoning=False)[2] == [("get_time", value)]


def test_cut_by_length(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, "still think", cut=True) == ("still think", "", [])
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>"
    for arguments in ("", '{"a"', '{"a": "x <|tool_call_end|> y', '{"a": 1}'):
        assert shown(tokenizer, text + arguments, reasoning=False, cut=True) == ("", "", [])


def test_a_string_that_never_closes_swallows_nothing(tokenizer: Tokenizer) -> None:
    """JSON that the model left open ends at its marker after all, and the calls behind it are found."""
    bad = CALL.format("functions.get_time:0", '{"a": "x}')
    text = SECTION.format(bad + bad + CALL.format("functions.get_weather:1", "{}")) + "end"
    calls = [("get_time", '{"a": "x}'), ("get_time", '{"a": "x}'), ("get_weather", "{}")]
    assert shown(tokenizer, text, reasoning=False) == ("", "end", calls)


def test_without_tools_no_call_is_read(tokenizer: Tokenizer) -> None:
    text = "r" + SECTION.format(CALL.format("functions.get_time:0", "{}")) + "z"
    assert shown(tokenizer, text, tools=None) == ("r", "functions.get_time:0{}z", [])


def test_start_of_an_answer_is_read_from_the_prompt(tokenizer: Tokenizer) -> None:
    for prompt, inside in (
        ("<|im_assistant|>assistant<|im_middle|><think>", True),
        ("<|im_assistant|>assistant<|im_middle|><think></think>", False),
        ("<think>old</think>x<|im_end|><|im_assistant|>assistant<|im_middle|>", False),
        ("no markers", False),
    ):
        assert begins_inside_reasoning(tokenizer, ids_of(tokenizer, prompt)) is inside
    spelled = tokenizer.encode_ordinary("<|im_assistant|>assistant<|im_middle|><think>")
    assert not begins_inside_reasoning(tokenizer, spelled)


def test_old_answers_open_their_own_reasoning(tokenizer: Tokenizer) -> None:
    assert shown(tokenizer, "<think>a</think>b", reasoning=False) == ("a", "b", [])
    assert shown(tokenizer, "<think>a</think>b") == ("a", "b", [])


def test_unfinished_characters_stay_in_their_channel(tokenizer: Tokenizer) -> None:
    flower = tokenizer.encode_ordinary("🌸")
    assert len(flower) > 1
    ids = [*flower[:-1], tokenizer.special("</think>"), *flower]
    assert parsed(tokenizer, [ids])[:2] == ("\ufffd", "🌸")


def test_ids_run_over_the_conversation() -> None:
    def asked(*ids: str) -> dict[str, object]:
        calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    def told(i: str) -> dict[str, object]:
        return {"role": "tool", "tool_call_id": i, "content": "r"}

    messages = [
        asked("call_a", "call_b"),
        told("call_b"),
        told("call_a"),
        asked("functions.f:6"),
        told("functions.f:6"),
    ]
    out, following = renumbered([*messages, asked("call_a"), told("call_a"), told("stranger")])
    assert [c["id"] for m in out for c in m.get("tool_calls", ())] == [f"functions.f:{i}" for i in (0, 1, 6, 7)]
    assert [m["tool_call_id"] for m in out if m["role"] == "tool"] == [
        *(f"functions.f:{i}" for i in (1, 0, 6, 7)),
        "stranger",
    ]
    assert following == 8
    assert messages[0]["tool_calls"][0]["id"] == "call_a"  # type: ignore[index]


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_in_any_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    matcher = Stops(stops)
    out = "".join(matcher.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))
    out += matcher.flush()
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)]
    if not ends:
        assert (out, matcher.found) == (text, None)
    else:
        longest = max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
        assert (out, matcher.found) == (text[: ends[0] - len(longest)], longest)


def test_compare_is_alive() -> None:
    assert compare(ParseResult(content="a"), ParseResult(content="b")) is Status.FAIL
    assert joined([Text("content", "a")]) == ("", "a", [])
