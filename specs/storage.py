"""Shapes and bytes of stored tensors: integers only, so that a plan needs no torch.

The layouts in runtime_min/kernels/layouts call these functions; a test holds both to the same numbers.
"""

from math import prod

GROUP = 32
PAGE = 4096
TILES = (256, 128, 64, 32)
ITEM_BYTES = {"BF16": 2, "F32": 4, "F16": 2, "I32": 4, "I64": 8, "U8": 1, "I8": 1, "F64": 8, "I16": 2, "BOOL": 1}


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a dense tensor; dtype as safetensors spells it."""
    return prod(shape) * ITEM_BYTES[dtype]


def largest_tile(size: int) -> int:
    """The largest legal tile edge that divides `size` (a multiple of 32)."""
    for tile in TILES:
        if size % tile == 0:
            return tile
    raise ValueError(f"{size} is not a multiple of {TILES[-1]}")


def int4_slot(n: int, k: int) -> tuple[int, int, int]:
    """(code words, scale words, padding words) of one [n, k] INT4 matrix, in int32 words.

    Codes take k/8 words a row, scales one BF16 per row and group of 32; the slot is padded to whole 4096-byte pages,
    so that a stack of experts can be read expert by expert with direct I/O.
    """
    codes = n * k // 8
    scales = n * (k // GROUP) // 2
    return codes, scales, -(codes + scales) % (PAGE // 4)
