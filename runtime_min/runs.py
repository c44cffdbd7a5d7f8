"""Stretches of equal things in a row."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def runs(things: Iterable[T], size: Callable[[T], int]) -> Iterator[tuple[int, int, T]]:
    """(where it begins, how many, which) of each stretch of equal things that take `size` places each."""
    start = 0
    for thing, same in groupby(things):
        count = len(list(same))
        yield start, count, thing
        start += count * size(thing)
