"""One choice of a reply as it grows: from the engine's tokens to text, calls, log-probabilities and a reason to end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from runtime_min.messages import Event, Logprob
from runtime_min.text import Stream, Tokenizer
from runtime_min.text.parser import Call, In, Parser, Part, Text
from runtime_min.text.stops import Stops

Reason = Literal["stop", "length", "tool_calls"]


class Reader(Protocol):
    """Tokens to parts."""

    def feed(self, token: int) -> Sequence[Part]: ...

    def finish(self, cut: bool) -> Sequence[Part]: ...


class Plain:
    """Text as it is, special tokens left out: what /v1/completions gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = Stream(tokenizer, skip_special=True)

    def feed(self, token: int) -> list[Part]:
        text = self._stream.feed(token)
        return [Text("content", text)] if text else []

    def finish(self, cut: bool) -> list[Part]:
        text = self._stream.flush()
        return [Text("content", text)] if text else []


@dataclass(frozen=True, slots=True)
class News:
    """What some tokens of one choice brought."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    scored: list[Logprob] = field(default_factory=list)


class Choice:
    """Tokens are counted as they are read: up to and with the one that ends the answer, none after it."""

    def __init__(self, reader: Reader, stops: Sequence[str], ends: frozenset[int]) -> None:
        """stops: strings that end the content; ends: ids that end the answer and are not shown."""
        self.reader, self.ends = reader, ends
        self.stops = Stops(stops)
        self.tokens = self.reasoning = self.cached = self.calls = 0
        self.reason: Reason | None = None
        self.error: str | None = None

    @property
    def done(self) -> bool:
        return self.reason is not None or self.error is not None

    def take(self, event: Event) -> News:
        """What an event brings. Sets `reason` when the answer ends, `error` when it fails."""
        news = News(scored=list(event.scored))
        self.cached = event.cached or self.cached
        if self.done:
            return news
        for i, token in enumerate(event.tokens):
            self.tokens += 1
            news.logprobs.extend(event.logprobs[i : i + 1])
            if token in self.ends:
                continue
            news.parts.extend(self._shown(self._read(token)))
            if self.stops.found is not None:
                self._end("stop")
                return news
        if event.finish in ("stop", "length"):
            news.parts.extend(self._shown(self.reader.finish(cut=event.finish == "length")))
            if self.stops.found is None and (held := self.stops.flush()):
                news.parts.append(Text("content", held))
            self._end("stop" if self.stops.found is not None else event.finish)
        elif event.finish is not None:
            self.error = event.error or f"the request was {event.finish}"
        return news

    def _end(self, reason: Reason) -> None:
        self.reason = "tool_calls" if self.calls and reason == "stop" else reason

    def _read(self, token: int) -> Sequence[Part]:
        if isinstance(self.reader, Parser) and self.reader.where is In.REASONING:
            parts = self.reader.feed(token)
            # The marker that ends the reasoning is no part of it.
            self.reasoning += self.reader.where is In.REASONING
            return parts
        return self.reader.feed(token)

    def _shown(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Content up to a stop string; the reasoning and calls as they are."""
        for part in parts:
            if self.stops.found is not None:
                return
            if isinstance(part, Call):
                self.calls += 1
                yield part
            elif part.channel == "reasoning":
                yield part
            elif text := self.stops.feed(part.text):
                yield Text("content", text)
