"""A model's answer, token by token, as reasoning, content and tool calls.

    answer    = [reasoning </think>] content [section content]
    section   = <|tool_calls_section_begin|> call* <|tool_calls_section_end|>
    call      = <|tool_call_begin|> id <|tool_call_argument_begin|> arguments <|tool_call_end|>

Markers are ids, so no text that merely looks like one is. One token is one step, so it does not matter in which groups
tokens arrive. Whether the answer begins inside the reasoning is read from the prompt.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from runtime_min.text.calls import called, kimi_id
from runtime_min.text.tokenizer import Stream, Tokenizer

THINK, THOUGHT, MIDDLE = "<think>", "</think>", "<|im_middle|>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = (THINK, THOUGHT, SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END)
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class In(Enum):
    """Where in an answer the next token is."""

    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()
    ID = auto()
    ARGUMENTS = auto()


@dataclass(frozen=True, slots=True)
class Text:
    """More of the reasoning or of the content."""

    channel: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A whole tool call; `arguments` is what the model wrote, JSON unless the model erred."""

    id: str
    name: str
    arguments: str


Part = Text | Call


def begins_inside_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Does an answer to this prompt begin inside the reasoning? Text from users never holds these ids."""
    ends = {tokenizer.special(THINK): True, tokenizer.special(THOUGHT): False, tokenizer.special(MIDDLE): False}
    return next((ends[i] for i in reversed(prompt) if i in ends), False)


class Parser:
    """One answer. Equal token sequences give equal parts, joined, however they are split into calls of `feed`."""

    def __init__(
        self, tokenizer: Tokenizer, *, reasoning: bool, tools: Collection[str] | None = None, first_call: int = 0
    ) -> None:
        """reasoning: the answer begins inside it. tools: the offered names, None if calls are not to be read: then
        what stands in a section is content. first_call: the number of the first call's id."""
        self.tokenizer, self.tools, self.calls = tokenizer, tools, first_call
        self.where = In.REASONING if reasoning else In.CONTENT
        self.unreadable = 0
        self._marks = {tokenizer.special(name): name for name in MARKS}
        self._silent = frozenset(tokenizer.vocabulary.specials.values())
        self._stream = Stream(tokenizer)
        self._id: list[int] = []
        self._arguments: list[int] = []
        self._end: int | None = None

    def feed(self, token: int) -> list[Part]:
        """What `token` completes."""
        if self.where is In.ARGUMENTS:
            return self._argument(token)
        mark = self._marks.get(token)
        if mark is not None:
            return self._marked(mark)
        if token in self._silent:
            return []
        if self.where is In.ID:
            self._id.append(token)
        elif self.where is not In.SECTION:
            return self._text(self._stream.feed(token))
        return []

    def finish(self, cut: bool) -> list[Part]:
        """What the end leaves. cut: the answer was ended from outside, so an open call is none."""
        parts: list[Part] = []
        while self.where is In.ARGUMENTS and self._end is not None and not cut:
            parts += self._reread(self._end)
        return parts + self._moved(In.CONTENT)

    def _text(self, text: str) -> list[Part]:
        channel: Literal["reasoning", "content"] = "reasoning" if self.where is In.REASONING else "content"
        return [Text(channel, text)] if text else []

    def _moved(self, where: In) -> list[Part]:
        """Another place; what an unfinished character leaves goes where it began."""
        left = self._text(self._stream.flush()) if self.where in (In.REASONING, In.CONTENT) else []
        self.where = where
        return left

    def _marked(self, mark: str) -> list[Part]:
        if mark == THINK:
            return self._moved(In.REASONING) if self.where is In.CONTENT else []
        if mark == THOUGHT:
            return self._moved(In.CONTENT) if self.where is In.REASONING else []
        if self.tools is None:
            return self._moved(In.CONTENT)
        if mark == ARGUMENTS and self.where is In.ID:
            self._arguments, self._end, self.where = [], None, In.ARGUMENTS
            return []
        if mark == CALL_END:
            return self._closed([]) if self.where is In.ID else []
        if mark == CALL:
            self._id = []
        places = {SECTION: In.SECTION, SECTION_END: In.CONTENT, CALL: In.ID}
        return self._moved(places[mark]) if mark in places else []

    def _argument(self, token: int) -> list[Part]:
        mark = self._marks.get(token)
        if token not in self._silent or self._open_string():
            if mark == CALL_END and self._end is None:
                self._end = len(self._arguments)
            self._arguments.append(token)
            return []
        if mark not in (CALL_END, SECTION_END, CALL):
            return []
        if self._end is not None and not _is_json(self.tokenizer.decode(self._arguments)):
            return [*self._reread(self._end), *self.feed(token)]
        return [*self._closed(self._arguments), *([] if mark == CALL_END else self._marked(mark))]

    def _reread(self, end: int) -> list[Part]:
        """A string was never closed: the first end was the call's own, and what follows is read again."""
        ids = self._arguments
        return [*self._closed(ids[:end]), *(part for token in ids[end + 1 :] for part in self.feed(token))]

    def _open_string(self) -> bool:
        return '"' in STRING.sub("", self.tokenizer.decode(self._arguments))

    def _closed(self, ids: Sequence[int]) -> list[Part]:
        """The call that ends here; if no name can be read in its id, its text as content."""
        self.where = In.SECTION
        said, arguments = self.tokenizer.decode(self._id), self.tokenizer.decode(ids).strip()
        name = called(said, self.tools or ())
        if name is None:
            self.unreadable += 1
            return [Text("content", f"{said}{arguments}")]
        self.calls += 1
        return [Call(kimi_id(name, self.calls - 1), name, arguments or "{}")]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
