"""The form of chat messages: what a template may rely on, and errors that name the message at fault."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specs.errors import InputError

TEXTS = ("name", "reasoning_content", "tool_call_id")
MEDIA = ("image", "image_url", "video", "video_url")


class ChatError(InputError):
    """Messages or tools of a form that no prompt can be made of, or a template that is none."""


def checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as a template expects them; ChatError with a line for each thing that is of another form.

    A key that is None is left out, for a template may print it; content alone is always there, None if there is none.
    A call without arguments has those of a call of nothing, `{}`.
    """
    problems = [p for i, message in enumerate(messages) for p in _problems(f"messages[{i}]", message)]
    if problems:
        raise ChatError(problems)
    return [_completed(message) for message in messages]


def _completed(message: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in message.items() if value is not None}
    calls = known.get("tool_calls")
    if calls:
        known["tool_calls"] = [{**call, "function": {**call["function"], **_arguments(call)}} for call in calls]
    return {**known, "content": message.get("content")}


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    given = call["function"].get("arguments")
    return {"arguments": {} if given is None else given}


def _problems(where: str, message: object) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield f"{where}: found {type(message).__name__}, expected an object"
        return
    if not isinstance(message.get("role"), str) or not message["role"]:
        yield f"{where}.role: found {message.get('role')!r}, expected a name such as user"
    for key in TEXTS:
        if not isinstance(message.get(key, ""), str | None):
            yield f"{where}.{key}: found {type(message[key]).__name__}, expected text"
    content = message.get("content")
    if isinstance(content, list | tuple):
        for i, part in enumerate(content):
            yield from _part_problems(f"{where}.content[{i}]", part)
    elif not isinstance(content, str | None):
        yield f"{where}.content: found {type(content).__name__}, expected text or a list of parts"
    yield from _call_problems(f"{where}.tool_calls", message.get("tool_calls"))


def _part_problems(where: str, part: object) -> Iterator[str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", *MEDIA):
        shown = repr(kind) if isinstance(part, Mapping) else type(part).__name__
        yield f"{where}: found {shown}, expected an object of type text, {', '.join(MEDIA)}"
    elif kind == "text" and not isinstance(part.get("text"), str):
        yield f"{where}.text: found {type(part.get('text')).__name__}, expected text"


def _call_problems(where: str, calls: object) -> Iterator[str]:
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        yield f"{where}: found {type(calls).__name__}, expected a list"
        return
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            yield f"{where}[{i}]: found no function, expected an object with id and function"
            continue
        if not isinstance(call.get("id"), str):
            yield f"{where}[{i}].id: found {call.get('id')!r}, expected text such as functions.NAME:0"
        arguments = function.get("arguments")
        if not isinstance(arguments, str | Mapping | None):
            yield f"{where}[{i}].function.arguments: found {type(arguments).__name__}, expected text or an object"
        elif isinstance(arguments, Mapping) and not _is_json(arguments):
            yield f"{where}[{i}].function.arguments: cannot be written as JSON"


def _is_json(value: Mapping[str, Any]) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
