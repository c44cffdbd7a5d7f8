"""Pages of the latent cache: who holds them, and which of them later requests may share."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from hashlib import blake2b

from specs.errors import InputError

PAGE_TOKENS = 64
# Padding rows look at this page. It belongs to nobody, is never written, and stays zero.
NULL_PAGE = 0


class CacheError(InputError):
    """The cache cannot hold what was asked for."""


@dataclass(slots=True)
class Sequence:
    """Tokens of one request whose rows are in the cache, and the pages that hold them."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


def page_key(before: bytes, ids: Ids[int], media: Iterable[tuple[int, bytes]] = ()) -> bytes:
    """Names a full page by all content up to its end: the key of the page before it, its ids, and (offset, digest)
    of every picture that reaches into it, whose ids alone say nothing."""
    digest = blake2b(before, digest_size=32)
    digest.update(array("q", ids).tobytes())
    for offset, content in media:
        digest.update(b"%d:" % offset + content)
    return digest.digest()


class Pool:
    """Counts references. A page without any is free, or idle if it can be found by its key: idle pages are reused
    last, the least recently used of them first."""

    def __init__(self, pages: int, page_tokens: int = PAGE_TOKENS) -> None:
        """`pages` that sequences can use; the null page comes on top."""
        self.pages, self.page_tokens = pages, page_tokens
        self.free = list(range(pages, NULL_PAGE, -1))
        self.references = [0] * (pages + 1)
        self.keys: dict[int, bytes] = {}
        self.found: dict[bytes, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return len(self.free) + len(self.idle)

    def count(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_tokens)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Makes room for `tokens` more; CacheError, and nothing changes, if there are not enough pages."""
        need = self.count(sequence.length + tokens) - len(sequence.pages)
        if need > self.available:
            raise CacheError(
                f"cache: {need} more pages of {self.page_tokens} tokens are needed, {self.available} of {self.pages} "
                "are free"
            )
        for _ in range(need):
            page = self.free.pop() if self.free else self._evicted()
            self.references[page] = 1
            sequence.pages.append(page)

    def _evicted(self) -> int:
        page, _ = self.idle.popitem(last=False)
        del self.found[self.keys.pop(page)]
        return page

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest known beginning of `keys`, held for the caller."""
        pages = []
        for key in keys:
            page = self.found.get(key)
            if page is None:
                break
            self.idle.pop(page, None)
            self.references[page] += 1
            pages.append(page)
        return pages

    def commit(self, page: int, key: bytes) -> None:
        """A held page whose rows are all final can be found from now on, unless another has the same content."""
        if page not in self.keys and key not in self.found:
            self.keys[page] = key
            self.found[key] = page

    def release(self, sequence: Sequence) -> None:
        """Gives up a sequence's pages and empties it. Its end is evicted before its beginning."""
        for page in reversed(sequence.pages):
            self.references[page] -= 1
            if not self.references[page]:
                if page in self.keys:
                    self.idle[page] = None
                else:
                    self.free.append(page)
        sequence.pages, sequence.length = [], 0

    def forget(self, keys: Iterable[bytes]) -> None:
        """Pages of these keys are not found any more; whoever holds them goes on."""
        for key in keys:
            page = self.found.pop(key, None)
            if page is not None:
                del self.keys[page]
                if page in self.idle:
                    del self.idle[page]
                    self.free.append(page)
