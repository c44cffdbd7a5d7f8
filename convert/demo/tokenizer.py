"""The demo's tokenizer: byte-pair ranks learnt from a short text, and the special tokens in the release's order."""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice, pairwise
from typing import Any

from convert.demo.geometry import SPECIALS, Geometry, template

NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
PLAIN = ("<think>", "</think>")
# A rough cut of English into words with their leading space; finer cuts at run time never lose a merge learnt here.
WORDS = re.compile(r" ?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+")


@cache
def ranks(count: int) -> tuple[bytes, ...]:
    """`count` tokens by rank: the 256 bytes, then merges by frequency, then pairs and triples of bytes as filling."""
    tokens = [bytes([b]) for b in range(256)]
    tokens += islice(_merges(template("words.txt")), count - len(tokens))
    known = set(tokens)
    tokens += islice((t for t in _filling() if t not in known), count - len(tokens))
    return tuple(tokens)


def _merges(text: str) -> Iterator[bytes]:
    """Joins of two known tokens, the most frequent in `text` first; ends when no pair occurs twice."""
    words = Counter(tuple(bytes([b]) for b in word.encode()) for word in WORDS.findall(text))
    while True:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, seen in words.items():
            for pair in pairwise(word):
                pairs[pair] += seen
        best = min(pairs, key=lambda p: (-pairs[p], p), default=None)
        if best is None or pairs[best] < 2:
            return
        yield best[0] + best[1]
        joined: Counter[tuple[bytes, ...]] = Counter()
        for word, seen in words.items():
            joined[_join(word, best[0] + best[1])] += seen
        words = joined


def _join(word: tuple[bytes, ...], token: bytes) -> tuple[bytes, ...]:
    """`word` with every neighbouring pair that spells `token` made one, from the left."""
    parts: list[bytes] = []
    for part in word:
        if parts and parts[-1] + part == token:
            parts[-1] = token
        else:
            parts.append(part)
    return tuple(parts)


def _filling() -> Iterator[bytes]:
    pairs = (i.to_bytes(2, "big") for i in range(1 << 16))
    triples = (i.to_bytes(3, "big") for i in range(1 << 24))
    yield from pairs
    yield from triples


def rank_file(count: int) -> str:
    """The text of tiktoken.model: one `base64 rank` pair a line."""
    return "".join(f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks(count)))


def special_tokens(geometry: Geometry) -> dict[int, str]:
    """All 256 special slots by id; a slot without a name is reserved."""
    first = geometry.ranks
    return {first + i: NAMED.get(i, f"<|reserved_token_{first + i}|>") for i in range(SPECIALS)}


def tokenizer_config(geometry: Geometry, eos: int) -> dict[str, Any]:
    """The content of tokenizer_config.json. The template is a file of its own, so there is none in here."""
    names = special_tokens(geometry)
    added = {
        str(i): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in PLAIN,
        }
        for i, name in names.items()
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": [n for n in NAMED.values() if n.startswith("<|")],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": names[eos],
        "model_max_length": 262144,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
