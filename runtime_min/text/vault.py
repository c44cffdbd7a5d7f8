"""Stand-ins for user text while a template renders, so that what the user wrote is never read as the template's."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from runtime_min.text.tokenizer import Piece

# Private-use characters: no template uses them, nothing trims, cases or escapes them.
OPEN, CLOSE = "\ue0f0", "\ue0f1"
STAND_IN = re.compile(f"{OPEN}([0-9]+){CLOSE}")
# Values of these keys steer the template, which compares them with words of its own.
STEERING = ("role", "type")


class Vault:
    """The user strings of one rendering.

    A stand-in keeps what templates ask of a string: it is a string, empty or blank as the original is, and its outer
    white space is the original's, so that trimming works. What is inside stays out of the template's sight.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []

    def hide(self, text: str) -> str:
        """`text` with a stand-in for everything but its outer white space."""
        core = text.strip()
        if not core:
            return text
        self._texts.append(core)
        start = text.index(core)
        return f"{text[:start]}{OPEN}{len(self._texts) - 1}{CLOSE}{text[start + len(core) :]}"

    def hide_all(self, value: Any) -> Any:
        """JSON `value` with every string hidden, keys too; identifiers stay as keys and as roles and types."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, Mapping):
            return {self._key(key): self._member(key, member) for key, member in value.items()}
        return [self.hide_all(v) for v in value] if isinstance(value, list | tuple) else value

    def _key(self, key: object) -> object:
        # No special token is an identifier, so a key that is one can only be plain text.
        return self.hide(key) if isinstance(key, str) and not key.isidentifier() else key

    def _member(self, key: object, member: Any) -> Any:
        return self._key(member) if key in STEERING and isinstance(member, str) else self.hide_all(member)

    def reveal(self, text: str) -> str:
        """`text` with the originals back in place."""
        return STAND_IN.sub(lambda found: self._texts[int(found[1])], text)

    def reveal_all(self, value: Any) -> Any:
        """JSON `value` with the originals back in place, in keys and members."""
        if isinstance(value, str):
            return self.reveal(value)
        if isinstance(value, Mapping):
            return {self.reveal_all(key): self.reveal_all(member) for key, member in value.items()}
        return [self.reveal_all(v) for v in value] if isinstance(value, list | tuple) else value

    def serialize(self, value: Any, dump: Callable[[Any], str]) -> str:
        """`dump` of the originals in `value`, hidden in turn: escaping and key order are as without stand-ins."""
        return self.hide(dump(self.reveal_all(value)))

    def pieces(self, rendered: str) -> list[Piece]:
        """`rendered` in order: the template's own text, trusted, and the users', not."""
        found: list[Piece] = []
        at = 0
        for stand_in in STAND_IN.finditer(rendered):
            found += [Piece(rendered[at : stand_in.start()], True), Piece(self._texts[int(stand_in[1])], False)]
            at = stand_in.end()
        return [piece for piece in (*found, Piece(rendered[at:], True)) if piece.text]
