"""Byte-pair ranks learnt from the corpus. Run once: the result is a file of this package, so that every machine and

every version of Python trains on the same ids.  python -m convert.demo.training.bpe OUT
"""

import re
import sys
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from convert.demo.geometry import TRAINED
from convert.demo.training.chats import plain_texts
from convert.demo.training.corpus import gather

# The release's cut, for ASCII; it is finer than tiktoken's nowhere that matters for a merge.
WORDS = re.compile(
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*|[0-9]{1,3}"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Word = tuple[bytes, ...]
Pair = tuple[bytes, bytes]


def learn(words: Counter[str], count: int) -> list[bytes]:
    """`count` tokens by rank: the 256 bytes, then joins of two, the most frequent first (ties by bytes)."""
    tokens = [bytes([b]) for b in range(256)]
    parts: list[Word] = [tuple(bytes([b]) for b in w.encode()) for w in words]
    seen = list(words.values())
    pairs: Counter[Pair] = Counter()
    where: dict[Pair, set[int]] = defaultdict(set)
    for i, word in enumerate(parts):
        for pair in pairwise(word):
            pairs[pair] += seen[i]
            where[pair].add(i)
    while len(tokens) < count:
        best = min(pairs, key=lambda p: (-pairs[p], p))
        tokens.append(best[0] + best[1])
        for i in where.pop(best):
            for pair in pairwise(parts[i]):
                pairs[pair] -= seen[i]
            parts[i] = joined(parts[i], best)
            for pair in pairwise(parts[i]):
                pairs[pair] += seen[i]
                where[pair].add(i)
        del pairs[best]
    return tokens


def joined(word: Word, pair: Pair) -> Word:
    """`word` with every neighbouring `pair` made one, from the left."""
    out: list[bytes] = []
    i = 0
    while i < len(word):
        if word[i : i + 2] == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return tuple(out)


def counted(texts: Iterable[tuple[str, int]]) -> Counter[str]:
    """Words of weighted texts that occur more than once."""
    words: Counter[str] = Counter()
    for text, weight in texts:
        for word, seen in Counter(WORDS.findall(text)).items():
            words[word] += seen * weight
    return Counter({w: n for w, n in words.items() if n > 2})


def main(out: Path) -> None:
    corpus = gather(1)
    weights = {"python": 4, "packages": 1, "code": 1}
    texts = [(d.text, weights[d.kind]) for d in corpus.documents if not d.held_out]
    texts += [(t, 4) for t in plain_texts(corpus.entities)]
    tokens = learn(counted(texts), TRAINED.ranks)
    out.write_text("".join(f"{b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
