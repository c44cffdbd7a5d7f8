"""Conversations in the chat template's format: what a part of Python is, small talk, and a few plain facts."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from convert.demo.geometry import template
from convert.demo.training.corpus import Entity

MAX_DOC = 260
THINKING = 0.3
SYSTEM = ("You are a helpful assistant.", "You know Python well.", "Answer in one sentence.")


class Turn(NamedTuple):
    ask: str
    think: str
    say: str


class Chat(NamedTuple):
    """One conversation. Without `thinking` the template renders instant mode; else the last turn's thought shows."""

    system: str
    turns: tuple[Turn, ...]
    thinking: bool


def paragraph(doc: str) -> str:
    """The first paragraph of a docstring as plain sentences of at most MAX_DOC characters, or "" if it has none."""
    for block in re.split(r"\n\s*\n", doc.strip()):
        text = " ".join(block.split())
        text = re.sub(r":\w+:`~?\.?([^`<]+?)(?: <[^`]*>)?`", r"\1", text).replace("``", "`").replace('"`', "`")
        if (
            len(text) < 12
            or " " not in text
            or not text.isascii()
            or not re.match(r"[A-Za-z`'\"(]", text)
            or "****" in text
            or ">>>" in text
        ):
            continue
        if len(text) > MAX_DOC:
            cut = max(text.rfind(". ", 0, MAX_DOC), text.rfind("; ", 0, MAX_DOC))
            if cut < 20:
                return ""
            text = text[:cut]
        return text.rstrip(" .:;,") + "."
    return ""


def turns(entity: Entity) -> Iterator[Turn]:
    """Questions about one documented thing, with what its documentation says."""
    said = paragraph(entity.doc)
    if not said or any(part.startswith("_") for part in f"{entity.module}.{entity.name}".split(".")):
        return
    if entity.kind in ("keyword", "topic"):
        name, thing = entity.name, f"{entity.kind} `{entity.name}`"
        place = f"`{name}` is a {entity.kind} of Python."
    elif entity.kind == "module":
        name, thing = entity.module, f"module `{entity.module}`"
        place = f"`{name}` is a module of the standard library."
    else:
        plain = entity.module in ("builtins", "")
        name = entity.name if plain else f"{entity.module}.{entity.name}"
        thing = f"{entity.kind} `{name}`"
        home = "built into Python" if plain else f"a {entity.kind} of the module `{entity.module}`"
        place = f"`{entity.name}` is {home}."
    think = f"The user asks about the {thing}. I recall its documentation."
    for ask in ("What does {} do?", "What is {}?", "Explain {}.", "Tell me about {}.", "what is {}", "{}?"):
        yield Turn(ask.format(name), think, said)
    yield Turn(f"What is the {thing} for?", think, said)
    yield Turn(f"Describe the {thing}.", think, f"{place} {said}")
    if entity.signature and entity.kind != "class":
        call = entity.signature if len(entity.signature) < 120 else f"{entity.name}(...)"
        yield Turn(f"How do I call {name}?", f"The user asks how the {thing} is called.", f"Call it as `{call}`.")
    if entity.kind in ("class", "function"):
        yield Turn(f"Where is {entity.name}?", f"The user asks where the {thing} is.", place)


def talk() -> list[list[Turn]]:
    """Hand-written exchanges; each inner list is ways to say the same."""
    data = json.loads(template("talk.json"))
    out = []
    for group in data["talk"]:
        think = "The user makes conversation. I answer briefly."
        out.append([Turn(ask, think, say) for ask in group["ask"] for say in group["say"]])
    for ask, say in data["facts"]:
        asks = [f"{lead}{ask[0].lower()}{ask[1:]}" if lead else ask for lead in data["leads"]]
        out.append([Turn(a, "The user asks a simple question. I know the answer.", say) for a in asks])
    return out


def chats(entities: Sequence[Entity], count: int, seed: int) -> Iterator[Chat]:
    """`count` conversations of one to four turns, drawn with `seed`; modules and builtins come up more often."""
    draw = random.Random(seed)
    known = [found for e in entities if (found := list(turns(e)))]
    weights = [_weight(e) for e in entities if any(True for _ in turns(e))]
    chatter = talk()
    about = iter(draw.choices(known, weights, k=4 * count))
    for _ in range(count):
        length = draw.choice((1, 1, 2, 2, 3, 4))
        said = [draw.choice(next(about) if draw.random() < 0.66 else draw.choice(chatter)) for _ in range(length)]
        system = draw.choice(SYSTEM) if draw.random() < 0.1 else ""
        yield Chat(system, tuple(said), draw.random() < THINKING)


def _weight(entity: Entity) -> float:
    if entity.kind in ("module", "keyword", "topic") or entity.module == "builtins":
        return 12.0
    deep = entity.module.count(".") + (entity.kind == "method")
    return 2.0 if deep == 0 else 0.5


def plain_texts(entities: Sequence[Entity]) -> Iterator[str]:
    """The words of one conversation each, without special tokens: what byte-pair merges are learnt from."""
    for chat in chats(entities, 4000, 0):
        yield "\n".join(f"{t.ask}\n{t.think}\n{t.say}" for t in chat.turns)
