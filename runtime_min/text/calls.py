"""Ids of tool calls as the model was taught them, functions.NAME:INDEX, the index running over a conversation."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

KIMI = re.compile(r"functions\.(.+):(\d+)", re.DOTALL)
LOOSE = re.compile(r"(?:functions\.)?(.*?)(?::\d*)?")


def kimi_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


def called(said: str, offered: Collection[str]) -> str | None:
    """The name of a tool in what the model wrote as an id; None if there is none in it.

    An offered name is found with or without prefix and index; another is what is left without them.
    """
    whole = "".join(said.split())
    unprefixed = whole.removeprefix("functions.")
    for name in (whole, unprefixed, whole.rpartition(":")[0], unprefixed.rpartition(":")[0]):
        if name in offered:
            return name
    found = LOOSE.fullmatch(whole)
    name = found[1] if found else ""
    return name if name and not name.isdecimal() else None


def renumbered(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """A checked conversation with ids of another form renamed, results with their calls; and the next free index.

    Ids of another form in the history lead the model astray.
    """
    following = 0
    names: dict[str, str] = {}
    out: list[dict[str, Any]] = []
    for message in map(dict, messages):
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                known = KIMI.fullmatch(call["id"])
                index = int(known[2]) if known else following
                names[call["id"]] = call["id"] if known else kimi_id(str(call["function"].get("name")), index)
                following = max(following, index + 1)
                calls.append({**call, "id": names[call["id"]]})
            message["tool_calls"] = calls
        if message.get("tool_call_id") in names:
            message["tool_call_id"] = names[message["tool_call_id"]]
        out.append(message)
    return out, following
