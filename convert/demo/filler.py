"""Weights of a full-size demo: a few random blocks, written over and over from varying offsets.

Nothing here needs torch, and memory stays near the size of the blocks however large the checkpoint is.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import numpy as np

from convert.demo.inventory import TensorSpec
from convert.demo.noise import bf16, raw, stream

CODES = 64 << 20
SCALES = 2 << 20
NORMALS = 2 << 20
ALIGN = 64


class Filler:
    """Random blocks shared by all tensors: `CODES` bytes of INT4 codes, `SCALES` BF16 scales, `NORMALS` fp32 normals.

    Scales are uniform in 0.005..0.02; other tensors get their own mean and standard deviation.
    """

    def __init__(self, seed: int) -> None:
        self.codes = memoryview(stream(seed, "codes").bytes(CODES))
        spread = stream(seed, "scales").random(SCALES, dtype=np.float32)
        self.scales = raw(bf16(np.float32(0.005) + np.float32(0.015) * spread))
        self.normals = stream(seed, "normals").standard_normal(NORMALS, dtype=np.float32)

    def payloads(self, specs: Sequence[TensorSpec]) -> Iterator[Iterator[memoryview]]:
        """The bytes of each of one file's tensors, in the order of `specs`, in pieces."""
        for spec in specs:
            yield self.pieces(spec)

    def pieces(self, spec: TensorSpec) -> Iterator[memoryview]:
        if spec.kind == "shape":
            return iter((raw(np.array(spec.logical, dtype=np.int32)),))
        block = {"packed": self.codes, "scale": self.scales}.get(spec.kind) or self.noise(spec)
        start = int.from_bytes(sha256(spec.name.encode()).digest()[:8], "little") % len(block) // ALIGN * ALIGN
        return cycle(block, start, spec.nbytes)

    def noise(self, spec: TensorSpec) -> memoryview:
        """A block with the spec's distribution and dtype, no longer than the tensor needs."""
        drawn = self.normals[: int(np.prod(spec.shape))]
        values = np.float32(spec.mean) + np.float32(spec.std) * drawn
        return raw(bf16(values) if spec.dtype == "BF16" else values)


def cycle(block: memoryview, start: int, nbytes: int) -> Iterator[memoryview]:
    """Pieces of `block`, read round and round from `start`, `nbytes` in all."""
    while nbytes:
        piece = block[start : start + nbytes]
        nbytes -= len(piece)
        start = 0
        yield piece
