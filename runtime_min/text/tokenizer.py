"""Text to ids and back: byte-pair ranks by tiktoken, special tokens by the names that the files give them."""

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import tiktoken

from runtime_min.text.files import TokenizerError, Vocabulary, read_vocabulary
from specs.pretokenizer import PRE_TOKENIZER

# Where the release's tokenizer cuts long text before BPE: the ids of such text depend on it, and so does the time,
# which is quadratic in the length of a run.
CHUNK_CHARS = 400_000
RUN_CHARS = 25_000
RUN = re.compile(r"\s+|\S+")


class Piece(NamedTuple):
    """A stretch of a prompt. Names of special tokens are ids in trusted text, and nothing but letters elsewhere."""

    text: str
    trusted: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Tokenizer:
    """A checkpoint's or an artifact's tokenizer. Whoever opened it has seen its files agree with config.json."""

    vocabulary: Vocabulary
    encoding: tiktoken.Encoding
    names: re.Pattern[str]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The tokenizer of `folder`: tiktoken.model, tokenizer_config.json, config.json and generation_config.json.

        Raises TokenizerError with a line for each file that is missing, damaged or at odds with another, and
        ConfigError for a config.json of another family.
        """
        vocabulary = read_vocabulary(folder)
        encoding = tiktoken.Encoding("kiln", pat_str=PRE_TOKENIZER, mergeable_ranks=vocabulary.ranks, special_tokens={})
        # Longest first, so that no name hides behind its own beginning.
        names = sorted(vocabulary.specials, key=lambda name: (-len(name), name))
        return cls(vocabulary=vocabulary, encoding=encoding, names=re.compile("|".join(map(re.escape, names))))

    @property
    def vocab_size(self) -> int:
        """Number of ids: ordinary ranks first, then special tokens."""
        return len(self.vocabulary.tokens)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a generation: what config.json and generation_config.json call eos, [EOS] and <|im_end|>."""
        return self.vocabulary.stop_ids

    def special(self, name: str) -> int:
        """The id of the special token `name`, such as `<|im_end|>`; TokenizerError if there is none."""
        found = self.vocabulary.specials.get(name)
        if found is None:
            raise TokenizerError(f"special token {name!r}: is not in tokenizer_config.json; ask for one that it lists")
        return found

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text` with every character taken literally: never the id of a special token."""
        if len(text) <= RUN_CHARS:
            return self.encoding.encode_ordinary(text)
        return [i for part in _cut(text) for i in self.encoding.encode_ordinary(part)]

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of a prompt. Neighbouring ordinary text is one run for BPE, whatever pieces it came in."""
        ids: list[int] = []
        run: list[str] = []
        for special, text in self._stretches(pieces):
            if not special:
                run.append(text)
                continue
            ids += self.encode_ordinary("".join(run))
            ids.append(self.special(text))
            run.clear()
        return ids + self.encode_ordinary("".join(run))

    def _stretches(self, pieces: Iterable[Piece]) -> Iterator[tuple[bool, str]]:
        """(is a special token, text) in order; trusted pieces are split at the names of special tokens."""
        for piece in pieces:
            at = 0
            for found in self.names.finditer(piece.text) if piece.trusted else ():
                yield False, piece.text[at : found.start()]
                yield True, found[0]
                at = found.end()
            yield False, piece.text[at:]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that id `token` stands for, a special token's being its name; TokenizerError for an unknown id."""
        if not 0 <= token < self.vocab_size:
            raise TokenizerError(f"id {token}: is outside the vocabulary 0..{self.vocab_size - 1}")
        return self.vocabulary.tokens[token]

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`, invalid UTF-8 replaced; `skip_special` leaves out what the files flag as special."""
        shown = (i for i in ids if not (skip_special and i in self.vocabulary.hidden))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")


class Stream:
    """Text of ids that arrive one at a time. All texts joined, with flush, equal `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.vocabulary.hidden if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """What `token` completes: whole characters only, "" while one is unfinished. TokenizerError: unknown id."""
        piece = self._tokenizer.token_bytes(token)
        return "" if token in self._hidden else self._utf8.decode(piece)

    def flush(self) -> str:
        """What an unfinished character leaves at the end, as one replacement character, or "". Ends the text."""
        left = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return left


def _cut(text: str) -> Iterator[str]:
    """`text` in pieces of at most CHUNK_CHARS, in which no run of blanks or of other characters exceeds RUN_CHARS."""
    for first in range(0, len(text), CHUNK_CHARS):
        chunk = text[first : first + CHUNK_CHARS]
        at = 0
        for run in RUN.finditer(chunk):
            for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                yield chunk[at:cut]
                at = cut
        yield chunk[at:]
