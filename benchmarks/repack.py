"""GB/s of one core that packs and unpacks each layout, over the bytes of the weight.

python benchmarks/repack.py [seconds per measurement]
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from runtime_min.kernels.layouts import Int4Groups, Int4Tile, Plain

INT4 = [
    ((512, 7168), (256, 256)),
    ((4096, 7168), (256, 256)),
    ((7168, 256), (256, 256)),
    ((7168, 2048), (256, 256)),
    ((4096, 7168), (128, 128)),
    ((4096, 7168), (64, 64)),
    ((4096, 7168), (32, 32)),
    ((7168, 128), (256, 128)),
]
# A rank of TP 8 packs a strip of every row; whole rows are read as they are stored.
PLAIN = [(7168, 8192), (7168, 18432)]
Call = Callable[[], object]


def best(call: Call, seconds: float) -> float:
    """Shortest time of a call, repeated for `seconds` and at least three times."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def int4(shape: tuple[int, int], form: Int4Tile) -> tuple[int, list[Call]]:
    """Bytes, and pack and unpack, after checking that they lose nothing."""
    n, k = shape
    words = torch.randint(-(2**31), 2**31, (n, k // 8)).to(torch.int32)
    weight = Int4Groups(words, torch.rand(n, k // 32).bfloat16())
    stored = form.pack(weight)
    again = form.unpack(stored, shape)
    if not (torch.equal(again.words, weight.words) and torch.equal(again.scales, weight.scales)):
        raise SystemExit(f"{form} loses codes or scales of {shape}: no speed for a wrong result")
    size = weight.words.nbytes + weight.scales.nbytes
    return size, [lambda: form.pack(weight), lambda: form.unpack(stored, shape)]


def plain(shape: tuple[int, int]) -> tuple[int, list[Call]]:
    """Bytes of a strip, and pack and unpack as the converter does them: out of the whole, and back into it."""
    form, whole = Plain(), torch.randint(-(2**15), 2**15, shape).to(torch.int16)
    strip = whole.narrow(1, 0, shape[1] // 8)
    stored = form.pack(strip)
    if not torch.equal(form.unpack(stored, tuple(strip.shape)), strip):
        raise SystemExit(f"{form} loses values of {shape}: no speed for a wrong result")
    return stored.nbytes, [lambda: form.pack(strip), lambda: strip.copy_(form.unpack(stored, tuple(strip.shape)))]


def rows(seconds: float) -> Iterator[tuple[Any, ...]]:
    """Layout, shape, tile or cut, GB/s of packing and of unpacking."""
    cases = [("int4_tile.v1", shape, "x".join(map(str, tile)), int4(shape, Int4Tile(*tile))) for shape, tile in INT4]
    cases += [("plain.v1", shape, "inputs over 8", plain(shape)) for shape in PLAIN]
    for layout, shape, how, (size, calls) in cases:
        yield (layout, list(shape), how, *(size / 1e9 / best(call, seconds) for call in calls))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    print("GB/s of one core\n\n| layout | [N, K] | tile or cut | pack | unpack |\n|---|---|---|--:|--:|")
    for layout, shape, how, pack, unpack in rows(seconds):
        print(f"| {layout} | {shape} | {how} | {pack:.2f} | {unpack:.2f} |")


if __name__ == "__main__":
    main()
