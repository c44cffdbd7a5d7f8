"""Replies as JSON: whole, and as the chunks of a stream."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from runtime_min.messages import Logprob
from runtime_min.serve.choice import News
from runtime_min.serve.jobs import Job
from runtime_min.text import Tokenizer
from runtime_min.text.parser import Call, Part, Text

Json = dict[str, Any]
# What stands for minus infinity, which JSON cannot say.
LOWEST = -9999.0


def dumps(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def event(value: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


class Reply:
    """What both endpoints share. kind: the prefix of ids; objects: the names of a whole reply and of a chunk."""

    kind: str
    objects: tuple[str, str]

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer, job: Job, *, usage_chunk: bool) -> None:
        self.id, self.model, self.created = f"{self.kind}-{request_id}", model, int(time.time())
        self.tokenizer, self.job, self.usage_chunk = tokenizer, job, usage_chunk
        self.parts: list[list[Part]] = [[] for _ in job.choices]
        self.logprobs: list[list[Logprob]] = [[] for _ in job.choices]
        self.scored: list[list[Logprob]] = [[] for _ in job.choices]

    def take(self, place: int, news: News) -> None:
        """Remembers, for a whole reply or the next chunk."""
        self.parts[place] += news.parts
        self.logprobs[place] += news.logprobs
        self.scored[place] += news.scored

    def opening(self) -> Iterator[Json]:
        """Chunks before the first token."""
        return iter(())

    def chunks(self, place: int) -> Iterator[Json]:
        """What has come for a choice since its last chunks, and its end."""
        choice = self.job.choices[place]
        if self.parts[place] or (choice.done and self.logprobs[place]):
            body = self.delta(place, self.parts[place], self.logprobs[place])
            self.parts[place], self.logprobs[place] = [], []
            yield self._chunk([{"index": place, **body, "finish_reason": None}])
        if choice.done:
            yield self._chunk([{"index": place, **self.delta(place, [], []), "finish_reason": choice.reason}])

    def delta(self, place: int, parts: Sequence[Part], logprobs: Sequence[Logprob]) -> Json:
        raise NotImplementedError

    def message(self, place: int, parts: Sequence[Part], logprobs: Sequence[Logprob]) -> Json:
        raise NotImplementedError

    def closing(self) -> Iterator[Json]:
        """Chunks after the last choice has ended."""
        if self.usage_chunk:
            yield {**self._chunk([]), "usage": self.usage()}

    def _chunk(self, choices: list[Json]) -> Json:
        head = {"id": self.id, "object": self.objects[1], "created": self.created, "model": self.model}
        return {**head, "choices": choices, **({"usage": None} if self.usage_chunk else {})}

    def whole(self) -> Json:
        choices = [
            {"index": i, **self.message(i, self.parts[i], self.logprobs[i]), "finish_reason": c.reason}
            for i, c in enumerate(self.job.choices)
        ]
        head = {"id": self.id, "object": self.objects[0], "created": self.created, "model": self.model}
        return {**head, "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Tokens up to and with those that ended the answers; every prompt once."""
        prompt, made = self.job.prompt_tokens, self.made()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(c.cached for c in self.job.choices[:: self.job.each])},
            "completion_tokens_details": {"reasoning_tokens": sum(c.reasoning for c in self.job.choices)},
        }

    def made(self) -> int:
        return sum(c.tokens for c in self.job.choices)


def _said(parts: Sequence[Part], channel: Literal["reasoning", "content"]) -> str:
    return "".join(p.text for p in parts if isinstance(p, Text) and p.channel == channel)


class ChatReply(Reply):
    kind = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, *args: Any, logprobs: bool, **how: Any) -> None:
        super().__init__(*args, **how)
        self.with_logprobs = logprobs
        self._calls = [0 for _ in self.parts]

    def opening(self) -> Iterator[Json]:
        for i in range(len(self.parts)):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])

    def delta(self, place: int, parts: Sequence[Part], logprobs: Sequence[Logprob]) -> Json:
        calls = [p for p in parts if isinstance(p, Call)]
        said = {"reasoning_content": _said(parts, "reasoning"), "content": _said(parts, "content")}
        delta: Json = {name: text for name, text in said.items() if text}
        if calls:
            delta["tool_calls"] = [{"index": i, **_call(c)} for i, c in enumerate(calls, self._calls[place])]
            self._calls[place] += len(calls)
        return {"delta": delta, "logprobs": self._logprobs(logprobs)}

    def message(self, place: int, parts: Sequence[Part], logprobs: Sequence[Logprob]) -> Json:
        calls = [_call(p) for p in parts if isinstance(p, Call)]
        content, reasoning = _said(parts, "content"), _said(parts, "reasoning")
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        message["annotations"] = []
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": self._logprobs(logprobs)}

    def _logprobs(self, entries: Sequence[Logprob]) -> Json | None:
        """One entry for every generated token, those of the reasoning and of markers too."""
        if not self.with_logprobs or not entries:
            return None
        return {
            "content": [
                {
                    **self._token(e.token, e.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in e.top],
                }
                for e in entries
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> Json:
        data = self.tokenizer.token_bytes(token)
        return {"token": name(data), "logprob": max(logprob, LOWEST), "bytes": list(data)}


def _call(call: Call) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def name(data: bytes) -> str:
    """A token as text; of one that is no whole characters its bytes, so that different tokens have different names."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


class TextReply(Reply):
    kind = "cmpl"
    objects = ("text_completion", "text_completion")

    def __init__(self, *args: Any, logprobs: bool, echo: bool, prompt_only: bool, **how: Any) -> None:
        super().__init__(*args, **how)
        self.with_logprobs, self.echo, self.prompt_only = logprobs, echo, prompt_only
        self._offsets = [0 for _ in self.parts]

    def made(self) -> int:
        return 0 if self.prompt_only else super().made()

    def delta(self, place: int, parts: Sequence[Part], logprobs: Sequence[Logprob]) -> Json:
        return {"text": _said(parts, "content"), "logprobs": self._logprobs(place, logprobs)}

    def message(self, place: int, parts: Sequence[Part], logprobs: Sequence[Logprob]) -> Json:
        text = "" if self.prompt_only else _said(parts, "content")
        made = [] if self.prompt_only else logprobs
        if not self.echo:
            return {"text": text, "logprobs": self._logprobs(place, made)}
        prompt = self.job.requests[place].prompt
        # The first token of a prompt has no probability.
        first = Logprob(token=prompt[0], logprob=0.0, top=())
        told = self._logprobs(place, [first, *self.scored[place], *made])
        if told is not None:
            told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return {"text": self.tokenizer.decode(prompt) + text, "logprobs": told}

    def _logprobs(self, place: int, entries: Sequence[Logprob]) -> Json | None:
        if not self.with_logprobs or not entries:
            return None
        names = [name(self.tokenizer.token_bytes(e.token)) for e in entries]
        offsets = []
        for said in names:
            offsets.append(self._offsets[place])
            self._offsets[place] += len(said)
        tops = [{name(self.tokenizer.token_bytes(t)): max(p, LOWEST) for t, p in e.top} for e in entries]
        return {
            "tokens": names,
            "token_logprobs": [max(e.logprob, LOWEST) for e in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }
