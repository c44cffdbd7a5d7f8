"""GB/s of one core that packs and unpacks int4_tile.v1, over the bytes of words and scales.

python benchmarks/repack.py [seconds per measurement]
"""

import sys
import time
from collections.abc import Callable

import torch

from runtime_min.kernels.layouts import Int4Groups, Int4Tile

CASES = [
    ((512, 7168), (256, 256)),
    ((4096, 7168), (256, 256)),
    ((7168, 256), (256, 256)),
    ((7168, 2048), (256, 256)),
    ((4096, 7168), (128, 128)),
    ((4096, 7168), (64, 64)),
    ((4096, 7168), (32, 32)),
    ((7168, 128), (256, 128)),
]


def best(call: Callable[[], object], seconds: float) -> float:
    """Shortest time of a call, repeated for `seconds` and at least three times."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def speeds(shape: tuple[int, int], form: Int4Tile, seconds: float) -> list[float]:
    """GB/s of pack, pack_into and unpack, after checking that they lose nothing."""
    n, k = shape
    words = torch.randint(-(2**31), 2**31, (n, k // 8)).to(torch.int32)
    weight = Int4Groups(words, torch.rand(n, k // 32).bfloat16())
    stored = form.pack(weight)
    again = form.unpack(stored, shape)
    if not (torch.equal(again.words, weight.words) and torch.equal(again.scales, weight.scales)):
        raise SystemExit(f"{form} loses codes or scales of {shape}: no speed for a wrong result")
    calls = (lambda: form.pack(weight), lambda: form.pack_into(weight, stored), lambda: form.unpack(stored, shape))
    gigabytes = (weight.words.nbytes + weight.scales.nbytes) / 1e9
    return [gigabytes / best(call, seconds) for call in calls]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    print(f"{'[N, K]':>14} {'tile':>9} {'pack':>7} {'into':>7} {'unpack':>7}   GB/s per core")
    for shape, tile in CASES:
        numbers = " ".join(f"{speed:7.2f}" for speed in speeds(shape, Int4Tile(*tile), seconds))
        print(f"{shape!s:>14} {'x'.join(map(str, tile)):>9} {numbers}")


if __name__ == "__main__":
    main()
