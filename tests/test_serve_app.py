"""The server over an engine double: replies and streams, stops, usage, refusals, limits, clients that leave."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime_min.sample import Sampling
from runtime_min.serve.server import Rules
from runtime_min.text import Piece, Tokenizer
from tests.scripted import until
from tests.serving import HELLO, TOOLS, WEB

SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
FULL = (
    "I think — 東京 🌸.</think>Look: "
    + SECTION.format(CALL.format("functions.f:0", '{"a": "東京 🌸"}') + CALL.format("functions.g:1", "{}"))
    + " Done 🌸."
)


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return Tokenizer.open(demo)


def joined(chunks: list[dict[str, Any]], place: int = 0) -> dict[str, Any]:
    """The message that the chunks of one choice make, as a client joins them."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != place:
                continue
            delta = choice["delta"]
            assert message["finish_reason"] is None, "something after the end"
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({k: v for k, v in call.items() if k != "index"})
            message["finish_reason"] = choice["finish_reason"]
    return message


def flat(body: dict[str, Any], place: int = 0) -> dict[str, Any]:
    choice = body["choices"][place]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": message.get("tool_calls", []),
        "finish_reason": choice["finish_reason"],
    }


def test_every_boundary_and_grouping_gives_one_message_and_one_usage(bench: Any, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode_pieces([Piece(FULL, True)]), tokenizer.special("<|im_end|>")]
    generator = random.Random(3)
    groupings = [[ids], [[i] for i in ids], *([ids[:at], ids[at:]] for at in range(1, len(ids)))]
    for _ in range(20):
        cuts = sorted(generator.sample(range(1, len(ids)), 5))
        groupings.append([ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)])
    # Streams of all, whole replies of some.
    plan = [(g, stream) for i, g in enumerate(groupings) for stream in (True, False) if stream or i % 8 == 0]
    left = iter([g for g, _ in plan])
    wanted = {
        "content": "Look:  Done 🌸.",
        "reasoning_content": "I think — 東京 🌸.",
        "tool_calls": [
            {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"a": "東京 🌸"}'}},
            {"id": "functions.g:1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
        "finish_reason": "tool_calls",
    }
    with bench(script=lambda _: next(left)) as b:
        thought = len(tokenizer.encode_ordinary("I think — 東京 🌸."))
        for _, stream in plan:
            if stream:
                chunks = b.stream(tools=TOOLS, stream_options={"include_usage": True})
                found, usage = joined(chunks), chunks[-1]["usage"]
            else:
                body = b.chat(tools=TOOLS).json()
                found, usage = flat(body), body["usage"]
            assert found == wanted
            assert usage["completion_tokens"] == len(ids)
            assert usage["completion_tokens_details"]["reasoning_tokens"] == thought


def test_shape_of_a_stream(bench: Any) -> None:
    with bench("think</think>Hi.") as b:
        chunks = b.stream(stream_options={"include_usage": True})
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(c["usage"] is None for c in chunks[:-1]) and chunks[-1]["choices"] == []
        assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        assert {c["id"] for c in chunks} == {chunks[0]["id"]} and chunks[0]["object"] == "chat.completion.chunk"
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert all("usage" not in c for c in b.stream())


def test_thinking_comes_from_the_prompt(bench: Any) -> None:
    with bench("just text") as b:
        assert flat(b.chat().json())["reasoning_content"] == "just text"
        off = flat(b.chat(chat_template_kwargs={"thinking": False}).json())
        assert (off["content"], off["reasoning_content"]) == ("just text", "")


def test_history_keeps_its_reasoning_if_told_to(bench: Any, tokenizer: Tokenizer) -> None:
    past = {"role": "assistant", "content": "A", "reasoning_content": "WHY"}
    with bench() as b:
        for kwargs in ({}, {"preserve_thinking": True}):
            b.chat(messages=[*HELLO, past, *HELLO], chat_template_kwargs=kwargs)
        dropped, kept = (tokenizer.decode(r.prompt) for r in b.engine.requests)
        assert "WHY" not in dropped and "<think>WHY</think>A" in kept


@pytest.mark.parametrize("stop", ["o w", "orld", "🌸", ["zzz", "lo"], "Hello world 🌸 bye"])
@pytest.mark.parametrize("group", [1, 2, 7])
def test_stop_strings(bench: Any, tokenizer: Tokenizer, stop: Any, group: int) -> None:
    text = "Hello world 🌸 bye"
    ids = tokenizer.encode_ordinary(text)
    at = min(text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    first = next(s for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    # The token that completes the stop is the last one counted, whatever came with it.
    count = next(n for n in range(1, len(ids) + 1) if first in tokenizer.decode(ids[:n]))
    with bench(f"o w lo orld</think>{text}", group=group) as b:
        whole = b.chat(stop=stop).json()
        chunks = b.stream(stop=stop, stream_options={"include_usage": True})
        assert flat(whole) == joined(chunks)
        assert (flat(whole)["content"], flat(whole)["finish_reason"]) == (text[:at], "stop")
        extra = len(tokenizer.encode_ordinary("o w lo orld")) + 1
        assert whole["usage"]["completion_tokens"] == count + extra == chunks[-1]["usage"]["completion_tokens"]
        until(lambda: not b.engine.unfinished)


def test_stop_ids_and_lengths(bench: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_ordinary("one two!")
    assert ids.count(ids[-1]) == 1
    with bench("</think>one two!") as b:
        done = b.chat(stop_token_ids=[ids[-1]]).json()
        assert flat(done)["content"] == tokenizer.decode(ids[:-1]) and flat(done)["finish_reason"] == "stop"
        assert b.engine.requests[0].stops > tokenizer.stop_ids
        for name in ("max_tokens", "max_completion_tokens"):
            cut = b.chat(**{name: 2}).json()
            assert flat(cut)["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 2
        b.chat(ignore_eos=True, max_tokens=3)
        assert b.engine.requests[-1].stops == frozenset()
        # The whole room is used if nobody says how much.
        b.chat()
        assert b.engine.requests[-1].max_tokens == 4096 - len(b.engine.requests[-1].prompt)


def test_a_stop_beats_the_length(bench: Any) -> None:
    with bench("</think>ab") as b:
        assert flat(b.chat(stop="b", max_tokens=3).json())["finish_reason"] == "stop"


def test_a_call_cut_by_length_is_none(bench: Any, tokenizer: Tokenizer) -> None:
    text = "</think>" + SECTION.format(CALL.format("functions.f:0", '{"a": 1}'))
    size = len(tokenizer.encode_pieces([Piece(text, True)]))
    with bench(text) as b:
        for most in range(1, size + 1):
            found = flat(b.chat(tools=TOOLS, max_tokens=most).json())
            assert found["finish_reason"] == "length"
            assert len(found["tool_calls"]) == (most >= size - 1) and found["content"] == ""


def test_sampling_reaches_the_engine(bench: Any) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.5, "logit_bias": {"5": -100, "3": 2}, "seed": 11,
    }  # fmt: skip
    with bench() as b:
        assert b.chat(**fields).status_code == 200
        s = b.engine.requests[0].sampling
        assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.5, 0.9, 7, 0.1)
        assert (s.presence, s.frequency, s.repetition, s.seed) == (1, -1, 1.5, 11)
        assert s.bias == ((3, 2.0), (5, -100.0)) and s.logprobs is None
        b.chat()
        assert b.engine.requests[1].sampling == Sampling(temperature=1.0)


def test_several_choices(bench: Any) -> None:
    with bench(lambda r: f"</think>seed {r.sampling.seed}") as b:
        body = b.chat(n=3, seed=5).json()
        assert [flat(body, i)["content"] for i in range(3)] == ["seed 5", "seed 6", "seed 7"]
        assert body["usage"]["prompt_tokens"] == len(b.engine.requests[0].prompt)
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        chunks = b.stream(n=3, seed=5)
        assert [joined(chunks, i)["content"] for i in range(3)] == ["seed 5", "seed 6", "seed 7"]
        assert len({r.prompt for r in b.engine.requests}) == 1


def test_logprobs(bench: Any, tokenizer: Tokenizer) -> None:
    with bench("x</think>🌸") as b:
        ids = [*tokenizer.encode_pieces([Piece("x</think>🌸", True)]), tokenizer.special("<|im_end|>")]
        whole = b.chat(logprobs=True, top_logprobs=2).json()
        entries = whole["choices"][0]["logprobs"]["content"]
        assert len(entries) == whole["usage"]["completion_tokens"] == len(ids)
        assert b"".join(bytes(e["bytes"]) for e in entries) == b"".join(map(tokenizer.token_bytes, ids))
        assert all(len(e["top_logprobs"]) == 2 and e["logprob"] == -0.5 for e in entries)
        assert [e["token"] for e in entries if e["token"].startswith("bytes:")]
        chunks = b.stream(logprobs=True, top_logprobs=2)
        told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"]]
        assert [e for t in told if t for e in t["content"]] == entries
        assert b.chat().json()["choices"][0]["logprobs"] is None
        assert b.engine.requests[-1].sampling.logprobs is None


def test_completions(bench: Any, tokenizer: Tokenizer) -> None:
    with bench("a <think>b") as b:
        body = b.post("/v1/completions", prompt="Once <|im_end|> upon").json()
        assert body["choices"][0]["text"] == "a <think>b" and body["object"] == "text_completion"
        # Control tokens cannot be written, only given as ids.
        assert b.engine.requests[0].prompt == tuple(tokenizer.encode_ordinary("Once <|im_end|> upon"))
        assert b.engine.requests[0].max_tokens == 16
        many = b.post("/v1/completions", prompt=[[1, 2], [3]], n=2, seed=0).json()
        assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3] and many["usage"]["prompt_tokens"] == 3
        chunks = b.stream("/v1/completions", prompt="x", stream_options={"include_usage": True})
        assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "a <think>b"
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop" and chunks[-1]["usage"]["completion_tokens"]


def test_prompt_logprobs(bench: Any, tokenizer: Tokenizer) -> None:
    """The form that lm-eval reads: probabilities of prompt and answer, the first of them unknown."""
    prompt = tokenizer.encode_ordinary("Some text here")
    with bench("next") as b:
        for most in (1, 0):
            body = b.post("/v1/completions", prompt=prompt, max_tokens=most, logprobs=1, echo=True, temperature=0)
            choice = body.json()["choices"][0]
            told = choice["logprobs"]
            assert b.engine.requests[-1].scored and b.engine.requests[-1].max_tokens == 1
            assert len(told["tokens"]) == len(told["token_logprobs"]) == len(prompt) + most
            assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
            assert all(p == -0.5 for p in told["token_logprobs"][1:]) and len(told["top_logprobs"][1]) == 1
            assert choice["text"].startswith("Some text here")
            assert body.json()["usage"]["completion_tokens"] == most
            joint = "".join(told["tokens"])
            assert [joint[o:].startswith(t) for o, t in zip(told["text_offset"], told["tokens"], strict=True)]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"foo": 1}, "foo"),
    ({"best_of": 2}, "best_of"),
    ({"store": True}, "store"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 9}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 100_000}, "4096"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "partial": True}]}, "messages[0].partial"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x" * 30_000}]}, "context of 4096"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"chat_template_kwargs": {"thinking": "no"}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
]


def test_what_is_not_honoured_is_refused_by_name(bench: Any) -> None:
    with bench() as b:
        for fields, name in REFUSED:
            answer = b.chat(**fields)
            assert answer.status_code == 400, fields
            error = answer.json()["error"]
            assert name in error["message"] and error["type"] == "invalid_request_error", (fields, error)
        assert b.engine.requests == []
        for broken in (b"{", b"[]", b"\xff", b'{"messages": NaN}'):
            answer = WEB.post(
                f"{b.url}/v1/chat/completions", content=broken, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_what_changes_nothing_is_taken(bench: Any) -> None:
    neutral = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "frequency_penalty": 0, "presence_penalty": 0.0, "n": 1,
        "logit_bias": {}, "response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "auto",
        "service_tier": "auto", "top_k": -1, "best_of": 1, "functions": [], "reasoning_effort": None, "tools": None,
        "modalities": ["text"], "safety_identifier": "s", "prompt_cache_key": "k", "logprobs": False, "stop": None,
    }  # fmt: skip
    with bench() as b:
        answer = b.chat(**neutral)
        assert answer.status_code == 200, answer.text


def test_tools_in_the_prompt_and_ids_over_the_conversation(bench: Any, tokenizer: Tokenizer) -> None:
    past = [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_9", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_9", "content": "r"},
    ]  # fmt: skip
    with bench("</think>" + SECTION.format(CALL.format("functions.g:0", "{}"))) as b:
        found = flat(b.chat(messages=[*HELLO, *past], tools=TOOLS).json())
        assert found["tool_calls"][0]["id"] == "functions.g:1"
        prompt = tokenizer.decode(b.engine.requests[0].prompt)
        assert "## Return of functions.f:0" in prompt and "call_9" not in prompt and "type g =" in prompt


def test_tool_choice_none_cannot_begin_a_call(bench: Any, tokenizer: Tokenizer) -> None:
    with bench("</think>" + SECTION.format(CALL.format("functions.g:0", "{}"))) as b:
        found = flat(b.chat(tools=TOOLS, tool_choice="none").json())
        assert found["tool_calls"] == [] and found["finish_reason"] == "stop"
        section = tokenizer.special("<|tool_calls_section_begin|>")
        assert b.engine.requests[0].sampling.bias == ((section, float("-inf")),)
        assert flat(b.chat().json())["tool_calls"] == []


def test_keys(bench: Any) -> None:
    with bench(rules=Rules(keys=("k1", "k2"))) as b:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer no"}, 401),
            ({"authorization": "k1"}, 401),
            ({"authorization": "Bearer k2"}, 200),
        ):
            assert WEB.get(f"{b.url}/v1/models", headers=headers).status_code == status
        assert WEB.get(f"{b.url}/health").status_code == 200 and WEB.get(f"{b.url}/").status_code == 200


def test_models_paths_and_types(bench: Any) -> None:
    with bench() as b:
        assert [m.id for m in b.client.models.list().data] == ["kimi"]
        assert b.client.models.retrieve("kimi").id == "kimi"
        assert WEB.get(f"{b.url}/v1/models/x").status_code == 404
        assert b.chat(model="other").json()["error"]["code"] == "model_not_found"
        assert WEB.get(f"{b.url}/nothing").json()["error"]["type"] == "not_found_error"
        plain = WEB.post(f"{b.url}/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert plain.status_code == 415


def test_a_full_queue_says_when_to_come_back(bench: Any) -> None:
    with bench(script=lambda _: [[]] * 100_000, most=2, pause=0.01) as b:
        with WEB.stream(
            "POST", f"{b.url}/v1/chat/completions", json={"model": "kimi", "messages": HELLO, "stream": True}
        ):
            until(lambda: len(b.engine.unfinished) == 1)
            answer = b.chat(n=2)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert "2 are allowed" in answer.json()["error"]["message"]
        # All or none: nothing of the refused request is left, and the client that left is cancelled.
        until(lambda: not b.engine.unfinished)
        assert len(b.engine.requests) == 1 and b.engine.cancelled == [0]


def test_a_body_too_large(bench: Any) -> None:
    with bench(rules=Rules(body=1000)) as b:
        assert b.chat(user="x" * 2000).status_code == 413

        def pieces() -> Iterator[bytes]:
            for _ in range(3):
                yield b"x" * 1000

        answer = WEB.post(
            f"{b.url}/v1/chat/completions", content=pieces(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(bench: Any, stream: bool) -> None:
    with bench(script=lambda _: [[5]] * 100_000, pause=0.005) as b:
        body = {"model": "kimi", "messages": HELLO, "stream": stream, "n": 2}
        if stream:
            with WEB.stream("POST", f"{b.url}/v1/chat/completions", json=body) as s:
                lines = s.iter_lines()
                assert all(next(lines) is not None for _ in range(4))
        else:
            with pytest.raises(httpx.TimeoutException):
                WEB.post(f"{b.url}/v1/chat/completions", json=body, timeout=0.3)
        until(lambda: sorted(b.engine.cancelled) == [0, 1] and not b.engine.unfinished)
        until(lambda: b.server.active == 0 and not b.server.pump.tickets)
        until(lambda: any("finish=gone" in line for line in b.log))


def test_a_request_that_takes_too_long(bench: Any) -> None:
    with bench(script=lambda _: [[5]] * 100_000, pause=0.005, rules=Rules(seconds=0.2)) as b:
        answer = b.chat()
        assert answer.status_code == 504 and "0.2 s" in answer.json()["error"]["message"]
        lines = b.post("/v1/chat/completions", messages=HELLO, stream=True).text.strip().split("\n\n")
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "timeout_error"
        with pytest.raises(openai.APIError, match="not answered"):
            list(b.client.chat.completions.create(model="kimi", messages=HELLO, stream=True))
        until(lambda: not b.engine.unfinished)


def test_silence_is_filled(bench: Any) -> None:
    with bench(pause=0.2, rules=Rules(beat=0.05)) as b:
        slow = b.post("/v1/chat/completions", messages=HELLO, stream=True, max_tokens=2).text
        assert slow.count(": waiting\n\n") >= 2 and slow.endswith("data: [DONE]\n\n")


def test_the_engine_dies(bench: Any) -> None:
    with bench(script=lambda _: [[5]] * 100_000, pause=0.005) as b:
        assert WEB.get(f"{b.url}/health").status_code == 200 == WEB.get(f"{b.url}/ready").status_code
        with WEB.stream(
            "POST", f"{b.url}/v1/chat/completions", json={"model": "kimi", "messages": HELLO, "stream": True}
        ) as s:
            lines = s.iter_lines()
            next(lines)
            b.engine.crash = "rank 3 of 8 was killed by signal 9"
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == b.engine.crash
        for path in ("/health", "/ready"):
            answer = WEB.get(f"{b.url}{path}")
            assert answer.status_code == 503 and "rank 3" in answer.text
        assert WEB.get(f"{b.url}/live").status_code == 200
        assert b.chat().status_code == 503


def test_deep_health_generates(bench: Any) -> None:
    with bench(rules=Rules(deep=0.2)) as b:
        assert WEB.get(f"{b.url}/health?deep=1").json()["token_seconds"] >= 0
        assert b.engine.requests[0].max_tokens == 1
        b.engine.script = lambda _: []
        answer = WEB.get(f"{b.url}/health?deep=1")
        assert answer.status_code == 503 and "no token" in answer.text
        until(lambda: not b.engine.unfinished)


def test_draining_refuses_new_work_only(bench: Any) -> None:
    with bench(script=lambda _: [[5]] * 50, pause=0.01) as b:
        body = {"model": "kimi", "messages": HELLO, "stream": True, "max_tokens": 50}
        with WEB.stream("POST", f"{b.url}/v1/chat/completions", json=body) as s:
            lines = s.iter_lines()
            next(lines)
            b.server.draining = True
            refused = b.chat()
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert WEB.get(f"{b.url}/ready").status_code == 503
            assert WEB.get(f"{b.url}/live").status_code == 200 == WEB.get(f"{b.url}/health").status_code
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_ids_and_log(bench: Any) -> None:
    with bench() as b:
        answer = WEB.post(
            f"{b.url}/v1/chat/completions",
            json={"model": "kimi", "messages": HELLO},
            headers={"x-request-id": "mine-1"},
        )
        assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "chatcmpl-mine-1"
        other = WEB.get(f"{b.url}/v1/models", headers={"x-request-id": "bad id"}).headers["x-request-id"]
        assert other != "bad id" and len(other) == 24
        until(lambda: len(b.log) == 2)
        assert b.log[0].startswith("mine-1 POST /v1/chat/completions 200 ") and "finish=stop" in b.log[0]


def test_small_pieces_are_sent_at_once(bench: Any) -> None:
    """Without TCP_NODELAY every chunk of a stream would wait for the acknowledgement of the one before, 40 ms."""
    with bench("</think>" + "word " * 40, pause=0.001) as b:
        begun = time.monotonic()
        assert len(b.stream()) > 40
        assert time.monotonic() - begun < 1.0


def test_metrics(bench: Any) -> None:
    with bench() as b:
        b.chat()
        b.stream()
        text = WEB.get(f"{b.url}/metrics").text
        assert 'kiln_requests_total{endpoint="chat",finish="stop"} 2.0' in text
        made = sum(len(g) for g in b.engine.script(b.engine.requests[0]))
        assert f"kiln_completion_tokens_total {2.0 * made}" in text
        assert "kiln_requests_under_way 0.0" in text and "kiln_first_token_seconds_count 2.0" in text


def test_the_openai_client(bench: Any) -> None:
    with bench(FULL, group=3) as b:
        whole = b.client.chat.completions.create(model="kimi", messages=HELLO, tools=TOOLS)
        message = whole.choices[0].message
        assert [c.function.name for c in message.tool_calls] == ["f", "g"]
        assert message.reasoning_content.startswith("I think") and message.content == "Look:  Done 🌸."
        # Its own answer goes back as it is.
        again = [*HELLO, message.model_dump()]
        again += [{"role": "tool", "tool_call_id": c.id, "content": "r"} for c in message.tool_calls]
        following = b.client.chat.completions.create(model="kimi", messages=again, tools=TOOLS)
        assert following.choices[0].message.tool_calls[0].id == "functions.f:2"
        with b.client.chat.completions.stream(model="kimi", messages=HELLO, tools=TOOLS) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0].message
        assert [c.function.arguments for c in final.tool_calls] == ['{"a": "東京 🌸"}', "{}"]
        text = b.client.completions.create(model="kimi", prompt="x", max_tokens=4)
        assert text.usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError, match="top_a"):
            b.client.chat.completions.create(model="kimi", messages=HELLO, extra_body={"top_a": 1})


def test_a_refusal_of_the_template_is_the_clients_fault(bench: Any) -> None:
    bad = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": {"name": "f"}}]}
    with bench() as b:
        assert b.chat(messages=[{"role": "tool", "content": "x", "tool_call_id": "y"}, bad]).status_code == 200
        assert b.chat(messages=[{"role": "user", "content": "x", "tool_calls": "no"}]).status_code == 400
