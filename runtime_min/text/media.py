"""Placeholders of pictures and clips in a rendered prompt, each expanded to the tokens that it costs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime_min.text.files import MEDIA_PAD
from runtime_min.text.messages import ChatError
from runtime_min.text.tokenizer import Piece

VIDEO = "<|kimi_k25_video_placeholder|>"
PLACEHOLDER = re.compile("|".join(map(re.escape, (MEDIA_PAD, VIDEO))))


@dataclass(frozen=True, slots=True)
class Slot:
    """What one placeholder stands for. chunks: (time of the first frame, tokens); an image is one chunk, without time.

    where: the place in the request, for errors.
    """

    where: str
    kind: Literal["image", "video"]
    chunks: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """What the placeholder becomes, as the reference processor writes it."""
        if self.kind == "image":
            return MEDIA_PAD * self.chunks[0][1]
        return "".join(
            f"{stamp}<|media_begin|>video<|media_content|>{MEDIA_PAD * tokens}<|media_end|>"
            for stamp, tokens in self.chunks
        )


def expanded(pieces: Iterable[Piece], media: Sequence[Slot]) -> list[Piece]:
    """`pieces` with the placeholders in trusted text replaced, in order. Text from users never is one.

    Raises ChatError with both numbers if there are not as many as `media`, or if an image meets a video's.
    """
    pieces = list(pieces)
    found = [name for piece in pieces if piece.trusted for name in PLACEHOLDER.findall(piece.text)]
    if len(found) != len(media):
        raise ChatError(f"the prompt has {len(found)} places for pictures and clips, the request has {len(media)}")
    for name, slot in zip(found, media, strict=True):
        if (name == VIDEO) != (slot.kind == "video"):
            raise ChatError(f"{slot.where}: is {slot.kind}, but the template writes {name} in its place")
    slots = iter(media)
    return [Piece(PLACEHOLDER.sub(lambda _: next(slots).text, p.text), True) if p.trusted else p for p in pieces]
