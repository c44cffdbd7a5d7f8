"""What a request asks for, as token ids and the pictures among them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime_min.artifact import Artifact
from runtime_min.pictures import PromptError
from runtime_min.text import ChatTemplate, Slot, Tokenizer
from runtime_min.text.messages import checked
from runtime_min.vision.items import Item, Media
from runtime_min.vision.rule import Rule
from runtime_min.vision.sources import Sources, parts

KEYS = {"messages", "tools", "thinking", "preserve_thinking"}


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Ids, and the pictures and chunks of clips whose tokens are among them, in order."""

    ids: list[int]
    items: tuple[Item, ...] = ()


def conversation(file: Path) -> dict[str, Any]:
    """messages and options of a JSON file: a list of messages, or an object that holds them."""
    try:
        chat = json.loads(file.read_text())
    except ValueError as e:
        raise PromptError(f"{file}: not valid JSON: {e}") from e
    options = {"messages": chat} if isinstance(chat, list) else chat
    if not isinstance(options, dict) or set(options) - KEYS or not isinstance(options.get("messages"), list):
        found = sorted(options) if isinstance(options, dict) else type(options).__name__
        raise PromptError(f"{file}: expected messages, tools, thinking, preserve_thinking; found {found}")
    return options


def user_message(text: str, images: Sequence[Path], videos: Sequence[Path]) -> dict[str, Any]:
    """One user's message: pictures, clips, then the text. The files are named by the caller, who may read them."""
    media = [{"type": "image", "image": str(p.absolute())} for p in images]
    media += [{"type": "video", "video": str(p.absolute())} for p in videos]
    return {"role": "user", "content": [*media, {"type": "text", "text": text}] if media else text}


def encoded(
    artifact: Artifact, tokenizer: Tokenizer, request: Mapping[str, Any], root: Path | None, thinking: bool = True
) -> Prompt:
    """The prompt of a conversation. `root` is the folder whose files it may name, None for none.

    Raises ChatError, ToolError or MediaError for what no prompt can be made of, and ArtifactError for pictures that
    the artifact's model cannot see.
    """
    messages = checked(request["messages"])
    media: list[Media] = []
    if next(parts(messages), None) is not None:
        artifact.require_vision()
        media = Sources(rule=Rule.open(artifact.path), root=root).media(messages)
    ids = ChatTemplate.open(artifact.path).encode_chat(
        tokenizer,
        messages,
        request.get("tools"),
        thinking=bool(request.get("thinking", thinking)),
        preserve_thinking=bool(request.get("preserve_thinking", False)),
        media=[slot(m) for m in media],
    )
    return Prompt(ids, tuple(item for m in media for item in m.items))


def slot(media: Media) -> Slot:
    """What the prompt needs to know of a picture or clip."""
    stamps = media.stamps or ("",)
    chunks = zip(stamps, (item.tokens for item in media.items), strict=True)
    return Slot(media.where, media.kind, tuple(chunks))
