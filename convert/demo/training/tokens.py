"""Texts and conversations as ids, as the runtime makes them: specials are legal in the template's own words only."""

import re
from base64 import b64decode
from functools import cache
from typing import Any, NamedTuple

import jinja2
import jinja2.sandbox
import tiktoken

from convert.demo.geometry import TRAINED, template
from convert.demo.tokenizer import special_tokens
from convert.demo.training.chats import Chat
from specs.pretokenizer import PRE_TOKENIZER

RANKS = "ranks.tiktoken"
# Private-use characters that stand for a user's words while the template is rendered.
SLOT = re.compile("\ue000([0-9]+)\ue001")
IDS = {name: i for i, name in special_tokens(TRAINED).items()}
NAMES = re.compile("|".join(map(re.escape, sorted(IDS, key=lambda n: (-len(n), n)))))
PAD, MASK, STOP = IDS["<|media_pad|>"], IDS["[UNK]"], IDS["<|im_end|>"]


class Part(NamedTuple):
    """A stretch of a rendered prompt: the id of a special token, or words, some of them numbered slots."""

    special: int | None
    words: tuple[str | int, ...]


@cache
def encoding() -> tiktoken.Encoding:
    lines = template(RANKS).splitlines()
    ranks = {b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    return tiktoken.Encoding("trained", pat_str=PRE_TOKENIZER, mergeable_ranks=ranks, special_tokens={})


@cache
def _template() -> jinja2.Template:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    return env.from_string(template("chat_template.jinja"))


@cache
def frame(system: bool, turns: int, thinking: bool, picture: bool) -> tuple[Part, ...]:
    """The template around the words of a conversation: slot 0 is the system's, then ask, think, say of each turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "\ue0000\ue001"}] if system else []
    for i in range(turns):
        ask, think, say = (f"\ue000{3 * i + k}\ue001" for k in (1, 2, 3))
        shown: Any = [{"type": "image"}, {"type": "text", "text": ask}] if picture else ask
        messages.append({"role": "user", "content": shown})
        messages.append({"role": "assistant", "reasoning_content": think, "content": say})
    text = _template().render(messages=messages[:-1], thinking=thinking, add_generation_prompt=True)
    last = f"\ue000{3 * turns - 1}\ue001</think>" if thinking else ""
    text = f"{text}{last}\ue000{3 * turns}\ue001<|im_end|>"
    return tuple(_parts(text))


def _parts(text: str) -> list[Part]:
    parts: list[Part] = []
    at = 0
    for found in [*NAMES.finditer(text), None]:
        words = text[at : found.start() if found else len(text)]
        if words:
            pieces = SLOT.split(words)
            parts.append(Part(None, tuple(int(p) if i % 2 else p for i, p in enumerate(pieces) if i % 2 or p)))
        if found:
            parts.append(Part(IDS[found[0]], ()))
            at = found.end()
    return parts


def rendered(chat: Chat, picture: bool = False, pads: int = 1) -> list[int]:
    """Ids of a whole conversation; with `picture` the first of each turn's words is one, of `pads` places."""
    slots = [chat.system, *(words for turn in chat.turns for words in turn)]
    ids: list[int] = []
    for part in frame(bool(chat.system), len(chat.turns), chat.thinking, picture):
        if part.special is None:
            ids += encoding().encode_ordinary("".join(slots[w] if isinstance(w, int) else w for w in part.words))
        else:
            ids += [part.special] * (pads if part.special == PAD else 1)
    return ids


def rank_text() -> str:
    """The text of tiktoken.model."""
    return template(RANKS)
