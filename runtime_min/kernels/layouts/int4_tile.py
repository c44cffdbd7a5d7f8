"""int4_tile.v1: one INT4 matrix [N, K] as tiles whose words a kernel turns into bf16 pairs with one lop3 each.

Slot: code words, scale words, zeros up to a multiple of 4096 bytes (specs.storage.int4_slot). Tiles lie in the order
[N/tile_n][K/tile_k]; a tile is [tile_n][tile_k/8] int32 words. With G = tile_k/32 groups of 32 inputs in a tile,
M = min(G, 4) and P = max(1, G/4) planes, element (n, k) has g = k % tile_k // 32, r = k % 32, p = r // 2 and lies in

    word = (p % 4M) * P + g // 4          slot = g % 4 + M * (p // 4M)          bit = 4 * slot + 16 * (r % 2)

of its row, as q + 8 like in the checkpoint. So a word holds four slots of two neighbouring inputs; (word >> 4 * slot)
& 0x000F000F is one pair, the even input in the low half. tile_k = 256, row n, the words of pairs (0, 1) and (2, 3):

                    bits 31..28  27..24  23..20  19..16 | 15..12  11..8    7..4    3..0
    word 0, k =              97      65      33       1 |     96     64      32       0
    word 1, k =             225     193     161     129 |    224    192     160     128
    word 2, k =              99      67      35       3 |     98     66      34       2
    word 3, k =             227     195     163     131 |    226    194     162     130

Scales: per tile, in the same order, [G/2][tile_n] int32 words of two bf16, group 2j low and 2j + 1 high; for G = 1
tile_n bf16, two rows a word, the even row low.

How the words are made without ever widening a code: nibble and byte places of a word against the number of the slot
it comes from are a permutation of address bits, so two rounds of delta swaps between slots (nibbles, then bytes) and a
copy of 16-bit halves do it. numpy, because its integer loops run about twice as fast as torch's on buffers that fit
the cache, and shift without sign. Little-endian, like the checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime_min.kernels.layouts.base import Int4Groups, LayoutError
from specs.storage import GROUP, TILES, int4_slot, largest_tile

# Small enough for the caches, and large enough that threads rarely meet at the interpreter lock between numpy calls:
# one thread is as fast with half of it, two are not.
CHUNK_BYTES = 1 << 20
# A group of 32 codes is four words; where a tile has fewer than four groups, its slots come from parts of a group.
UNIT: dict[int, npt.DTypeLike] = {4: np.complex128, 2: np.uint64, 1: np.uint32}
EXCHANGE = {4: np.uint32(0x0F0F0F0F), 8: np.uint32(0x00FF00FF)}

Words = npt.NDArray[np.uint32]
Pairs = Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """The layout with one tile size. Packing and unpacking are for CPU tensors; narrow works anywhere."""

    tile_n: int
    tile_k: int
    id: Literal["int4_tile.v1"] = field(default="int4_tile.v1", init=False)

    def __post_init__(self) -> None:
        for name, tile in self.parameters.items():
            if tile not in TILES:
                raise LayoutError(f"int4_tile.v1: {name} is one of {', '.join(map(str, TILES))}, found {tile!r}")

    @classmethod
    def for_shape(cls, n: int, k: int) -> "Int4Tile":
        """The largest tiles that divide an [n, k] matrix."""
        try:
            return cls(largest_tile(n), largest_tile(k))
        except ValueError as e:
            raise LayoutError(f"int4_tile.v1 cannot hold [{n}, {k}]: {e}") from e

    @property
    def parameters(self) -> dict[str, int]:
        return {"tile_n": self.tile_n, "tile_k": self.tile_k}

    def granule(self, axis: int) -> int:
        """The smallest cut of rows (axis 0) or inputs (axis 1)."""
        return (self.tile_n, self.tile_k)[axis]

    def storage(self, shape: tuple[int, int]) -> tuple[int]:
        """(int32 words of the slot,)."""
        for axis, size in enumerate(shape):
            granule = self.granule(axis)
            if size <= 0 or size % granule:
                raise LayoutError(f"{self}: axis {axis} of {list(shape)} is {size}, not a multiple of {granule}")
        return (sum(int4_slot(*shape)),)

    def pack(self, weight: Int4Groups) -> Tensor:
        """[slot words] int32."""
        out = torch.empty(self.storage(weight.shape), dtype=torch.int32)
        self.pack_into(weight, out)
        return out

    def pack_into(self, weight: Int4Groups, out: Tensor) -> None:
        """Fills out [slot words] int32, contiguous, padding included. Rows of the weight may be strided."""
        if not out.is_contiguous():
            raise LayoutError(f"{self}: a slot is contiguous, found strides {out.stride()}")
        shape = weight.shape
        codes, scales, padding = self._parts(_host(out), shape)
        padding[:] = 0
        rows, half = _host(weight.words), _host(weight.scales)
        self._tile_scales(scales, shape)[:] = self._row_scales(half, shape)
        room = self._room(shape)
        for low, high in self._chunks(shape):
            slots, spare, staged, tiles = self._views(codes, room, low, high, shape)
            for slot, units in self._units(slots, rows[low:high]):
                slot[...] = units
            _exchange(slots, spare, 4, axis=1)
            _exchange(slots, spare, 8, axis=0)
            for stored, halves in self._halves(staged, slots):
                stored[...] = halves
            if tiles is not None:
                tiles[...] = self._by_tile(staged, tiles)

    def unpack(self, stored: Tensor, shape: tuple[int, int]) -> Int4Groups:
        """stored [slot words] int32 -> the matrix as the checkpoint packs it."""
        codes, scales, _ = self._parts(_host(stored), shape)
        n, k = shape
        weight = Int4Groups(torch.empty(n, k // 8, dtype=torch.int32), torch.empty(n, k // GROUP, dtype=torch.bfloat16))
        rows, half = _host(weight.words), _host(weight.scales)
        self._row_scales(half, shape)[:] = self._tile_scales(scales, shape)
        room = self._room(shape)
        for low, high in self._chunks(shape):
            slots, spare, staged, tiles = self._views(codes, room, low, high, shape)
            if tiles is not None:
                self._by_tile(staged, tiles)[...] = tiles
            for words, halves in self._halves(staged, slots):
                halves[...] = words
            _exchange(slots, spare, 8, axis=0)
            _exchange(slots, spare, 4, axis=1)
            for slot, units in self._units(slots, rows[low:high]):
                units[...] = slot
        return weight

    def narrow(self, stored: Tensor, shape: tuple[int, int], axis: int, low: int, high: int) -> Tensor:
        """The packed form of rows (axis 0) or inputs (axis 1) low..high, by moving whole tiles."""
        granule = self.granule(axis)
        if low % granule or high % granule or not 0 <= low < high <= shape[axis]:
            where = f"{low}..{high} of axis {axis} of {list(shape)}"
            raise LayoutError(f"{self}: the cut {where} must lie inside it and on its granule {granule}")
        self._check(tuple(stored.shape), shape)
        cut = (high - low, shape[1]) if axis == 0 else (shape[0], high - low)
        out = torch.zeros(self.storage(cut), dtype=torch.int32, device=stored.device)
        start = [0, 0]
        for words, kept in zip(int4_slot(*shape)[:2], int4_slot(*cut)[:2], strict=True):
            tiles = stored[start[0] : start[0] + words].reshape(*self._grid(shape), -1)
            target = out[start[1] : start[1] + kept].view(*self._grid(cut), -1)
            target.copy_(tiles.narrow(axis, low // granule, (high - low) // granule))
            start = [start[0] + words, start[1] + kept]
        return out

    def _grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0] // self.tile_n, shape[1] // self.tile_k

    def _check(self, stored: tuple[int, ...], shape: tuple[int, int]) -> None:
        wanted = self.storage(shape)
        if stored != wanted:
            raise LayoutError(f"{self}: {list(shape)} is stored as {list(wanted)} words, found {list(stored)}")

    def _parts(self, stored: npt.NDArray[Any], shape: tuple[int, int]) -> tuple[Words, Words, Words]:
        """Codes, scales and padding of a slot."""
        self._check(stored.shape, shape)
        if stored.dtype != np.uint32:
            raise LayoutError(f"{self}: a slot is int32 words, found {stored.dtype}")
        codes, scales, _ = int4_slot(*shape)
        return stored[:codes], stored[codes : codes + scales], stored[codes + scales :]

    def _scale_type(self) -> type[np.generic]:
        return np.uint16 if self.tile_k == GROUP else np.uint32

    def _tile_scales(self, scales: Words, shape: tuple[int, int]) -> npt.NDArray[Any]:
        """[N/tile_n, K/(32 or 64), tile_n] of the slot."""
        return scales.view(self._scale_type()).reshape(shape[0] // self.tile_n, -1, self.tile_n)

    def _row_scales(self, scales: npt.NDArray[Any], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """The same view of the logical scales [N, K/32]."""
        units = scales.view(self._scale_type())
        return units.reshape(shape[0] // self.tile_n, self.tile_n, -1).transpose(0, 2, 1)

    def _chunks(self, shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
        """Ranges of rows: whole tiles, or parts of one."""
        step = self._step(shape)
        return ((low, min(low + step, shape[0])) for low in range(0, shape[0], step))

    def _step(self, shape: tuple[int, int]) -> int:
        rows = max(1, CHUNK_BYTES * 2 // shape[1])
        if rows < self.tile_n:
            return 1 << (rows.bit_length() - 1)
        return min(rows // self.tile_n * self.tile_n, shape[0])

    def _room(self, shape: tuple[int, int]) -> tuple[Words, Words, Words]:
        """Slots, spare and staging of one chunk; a call's own, so that threads may pack at once."""
        words = self._step(shape) * shape[1] // 8
        return np.empty(words, np.uint32), np.empty(words // 2, np.uint32), np.empty(words, np.uint32)

    def _views(
        self, codes: Words, room: tuple[Words, Words, Words], low: int, high: int, shape: tuple[int, int]
    ) -> tuple[Words, Words, Words, npt.NDArray[Any] | None]:
        """slots [2, 2, words/4], spare [2, words/4], staged [words], tiles [N tiles, K tiles, rows] of one chunk.

        A matrix one tile wide has its rows in the order of the tiles already: staged is then the slot itself.
        """
        row_words, (tiles_n, tiles_k) = shape[1] // 8, self._grid(shape)
        words = (high - low) * row_words
        slots, spare, staged = room[0][:words].reshape(2, 2, -1), room[1][: words // 2].reshape(2, -1), room[2][:words]
        if tiles_k == 1:
            return slots, spare, codes[low * row_words : high * row_words], None
        tile_rows = codes.view(f"V{self.tile_k // 2}").reshape(tiles_n, tiles_k, self.tile_n)
        count, first, row = min(high - low, self.tile_n), low // self.tile_n, low % self.tile_n
        return slots, spare, staged, tile_rows[first : first + (high - low) // count, :, row : row + count]

    @staticmethod
    def _by_tile(staged: Words, tiles: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """staged [row][K tile][words of a tile row] as `tiles` orders it."""
        count_n, count_k, rows = tiles.shape
        return staged.view(tiles.dtype).reshape(count_n, rows, count_k).transpose(0, 2, 1)

    def _units(self, slots: Words, rows: Words) -> Pairs:
        """Slots and planes beside the runs of source words they hold. slots [2, 2, words/4], rows [R, K/8]."""
        groups = min(self.tile_k // GROUP, 4)
        planes = max(1, self.tile_k // GROUP // 4)
        units = rows.view(UNIT[groups])
        by_slot = slots.view(UNIT[groups]).reshape(4, planes, len(rows), -1)
        for slot in range(4):
            first = slot % groups * (4 // groups) + slot // groups
            for plane in range(planes):
                yield by_slot[slot, plane], units[:, 4 * plane + first :: 4 * planes]

    def _halves(self, staged: Words, slots: Words) -> Pairs:
        """16-bit halves of stored words beside the halves of exchanged slots that they are. Both flat."""
        planes = max(1, self.tile_k // GROUP // 4)
        stored = staged.view(np.uint16).reshape(-1, 2, planes, 2)
        exchanged = slots.view(np.uint16).reshape(2, 2, planes, -1)
        for odd_pair in range(2):
            for odd_input in range(2):
                for plane in range(planes):
                    yield stored[:, odd_pair, plane, odd_input], exchanged[odd_pair, odd_input, plane]


def _host(tensor: Tensor) -> npt.NDArray[Any]:
    """The same memory for numpy: int32 words as uint32, bf16 as uint16. The last axis is contiguous."""
    if tensor.device.type != "cpu":
        raise LayoutError(f"int4_tile.v1 packs and unpacks on the CPU, found a tensor on {tensor.device}")
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    array: npt.NDArray[Any] = tensor.numpy()
    return array.view(np.uint32) if tensor.dtype == torch.int32 else array


def _exchange(slots: Words, spare: Words, shift: int, axis: int) -> None:
    """Swaps the high fields of `shift` bits of slots 0 with the low fields of slots 1 along axis; its own inverse."""
    low, high = (slots[0], slots[1]) if axis == 0 else (slots[:, 0], slots[:, 1])
    bits = np.uint32(shift)
    np.right_shift(low, bits, out=spare)
    np.bitwise_xor(spare, high, out=spare)
    np.bitwise_and(spare, EXCHANGE[shift], out=spare)
    np.bitwise_xor(high, spare, out=high)
    np.left_shift(spare, bits, out=spare)
    np.bitwise_xor(low, spare, out=low)
