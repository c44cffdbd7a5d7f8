"""Pages: counted, shared by content, evicted by least recent use, never lost."""

import random

import pytest
import torch

from runtime_min.kv import LatentCache, batch
from runtime_min.pages import NULL_PAGE, CacheError, Pool, Sequence, page_key


def full(pool: Pool, content: list[int]) -> Sequence:
    """A sequence of full pages, one number each, all committed."""
    sequence = Sequence()
    pool.grow(sequence, len(content) * pool.page_tokens)
    sequence.length = len(content) * pool.page_tokens
    for page, key in zip(sequence.pages, keys(content), strict=True):
        pool.commit(page, key)
    return sequence


def keys(content: list[int]) -> list[bytes]:
    out: list[bytes] = []
    for number in content:
        out.append(page_key(out[-1] if out else b"", [number]))
    return out


def test_the_cache_refuses_what_it_cannot_hold_and_gives_pages_back() -> None:
    cache = LatentCache(1, 200, 8, torch.float32, torch.device("cpu"), page_tokens=64)
    one, two = Sequence(), Sequence()
    batch(cache, [(one, list(range(100))), (two, [1])])
    with pytest.raises(CacheError, match="3 more pages of 64 tokens are needed, 1 of 4"):
        batch(cache, [(two, list(range(200)))])
    assert len(two.pages) == 1
    cache.pool.release(one)
    cache.pool.release(two)
    assert sorted(cache.pool.free) == [1, 2, 3, 4] and cache.rows.shape == (1, 5 * 64, 8)


def test_padding_writes_nowhere_and_sees_the_null_page() -> None:
    cache = LatentCache(1, 64, 8, torch.float32, torch.device("cpu"), page_tokens=4)
    step = batch(cache, [(Sequence(), [5, 6, 7])], padding=2)
    (part,) = step.parts
    assert step.slots.tolist()[3:] == [-1, -1] and min(step.slots.tolist()[:3]) >= 4
    assert part.pages.tolist()[1:] == [[NULL_PAGE], [NULL_PAGE]] and part.lengths.tolist() == [3, 1, 1]
    assert part.cu_q.tolist() == [0, 3, 4, 5] and step.last.tolist() == [2]


def test_sequences_of_few_and_many_tokens_are_apart() -> None:
    cache = LatentCache(1, 400, 8, torch.float32, torch.device("cpu"), page_tokens=4)
    step = batch(cache, [(Sequence(), [1]), (Sequence(), [1] * 16), (Sequence(), [1] * 17), (Sequence(), [1] * 90)])
    assert [(p.first, p.last, p.longest) for p in step.parts] == [(0, 17, 16), (17, 124, 90)]
    assert step.parts[1].bounds == ((0, 17, 107), (17, 90))


def test_a_beginning_is_found_and_an_end_is_evicted_first() -> None:
    pool = Pool(4, 1)
    pool.release(full(pool, [1, 2, 3]))
    assert pool.available == 4
    assert len(pool.match(keys([1, 2, 9]))) == 2 and pool.available == 2
    other = full(pool, [7, 8])
    assert pool.match(keys([1, 2, 3])[2:]) == [], "page 3 was the only one to give"
    assert len(other.pages) == 2 and pool.available == 0


def test_the_least_recently_used_goes_first() -> None:
    pool = Pool(3, 1)
    for number in (1, 2, 3):
        pool.release(full(pool, [number]))
    pool.release(Sequence(pool.match(keys([1]))))
    full(pool, [4])
    assert not pool.match(keys([2])) and pool.match(keys([1])) and pool.match(keys([3]))


def test_the_same_content_twice_is_kept_once() -> None:
    pool = Pool(4, 1)
    one, two = full(pool, [1, 2]), full(pool, [1, 2])
    assert one.pages != two.pages
    pool.release(two)
    assert len(pool.free) == 2
    pool.release(one)
    assert len(pool.idle) == 2


def test_forgotten_pages_are_not_found_and_not_lost() -> None:
    pool = Pool(4, 1)
    one = full(pool, [1, 2])
    shared = Sequence(pool.match(keys([1])))
    pool.forget(keys([1, 2]))
    assert not pool.match(keys([1]))
    pool.release(one)
    pool.release(shared)
    assert sorted(pool.free) == [1, 2, 3, 4] and not pool.idle
    pool.release(full(pool, [5]))
    pool.forget(keys([5]))
    assert len(pool.free) == 4 and not pool.idle


def test_keys_tell_contents_apart() -> None:
    """Ids, what came before, where a picture lies and which one it is."""
    base = page_key(b"", [1, 2])
    others = [
        page_key(b"", [2, 1]), page_key(base, [1, 2]), page_key(b"", [1, 2], [(0, b"a")]),
        page_key(b"", [1, 2], [(1, b"a")]), page_key(b"", [1, 2], [(0, b"b")]), page_key(b"", [1, 2], [(-1, b"a")]),
    ]  # fmt: skip
    assert len({base, *others}) == len(others) + 1 and page_key(b"", [1, 2]) == base


@pytest.mark.parametrize("seed", range(5))
def test_no_history_loses_a_page_or_shares_one_by_mistake(seed: int) -> None:
    r, pool = random.Random(seed), Pool(20, 2)
    alive: list[tuple[Sequence, list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(3000):
        if alive and r.random() < 0.45:
            sequence, numbers = alive.pop(r.randrange(len(alive)))
            if r.random() < 0.2:
                pool.forget(keys(numbers))
            pool.release(sequence)
        else:
            numbers = [r.randrange(3) for _ in range(r.randint(1, 4))]
            pages = pool.match(keys(numbers))
            for i, page in enumerate(pages):
                assert content[page] == tuple(numbers[: i + 1])
            sequence = Sequence(list(pages), 2 * len(pages))
            try:
                pool.grow(sequence, 2 * (len(numbers) - len(pages)))
            except CacheError:
                pool.release(sequence)
                continue
            fresh = sequence.pages[len(pages) :]
            assert not any(page in s.pages for page in fresh for s, _ in alive)
            sequence.length = 2 * len(numbers)
            for i, (page, key) in enumerate(zip(sequence.pages, keys(numbers), strict=True)):
                if page in fresh:
                    content[page] = tuple(numbers[: i + 1])
                pool.commit(page, key)
            alive.append((sequence, numbers))
        counts = [sum(page in s.pages for s, _ in alive) for page in range(21)]
        assert counts == pool.references
        assert sorted([*pool.free, *pool.idle]) == [p for p in range(1, 21) if not counts[p]]
