"""Four laws of every layout, all exact, and the map of int4_tile.v1 against a formula written here."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from torch import Tensor

from runtime_min.kernels.layouts import LAYOUTS, Int4Groups, Int4Tile, LayoutError, Plain, int4_tile, layout
from runtime_min.kernels.layouts.int4_tile_device import load_codes, load_scales
from specs.storage import TILES, int4_slot

EVERY_TILE = [Int4Tile(tile_n, tile_k) for tile_n, tile_k in product(TILES, TILES)]
COUNTS = [(1, 1), (1, 3), (5, 1), (2, 4), (3, 3)]
WHERE = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def tile_name(form: Int4Tile) -> str:
    return f"{form.tile_n}x{form.tile_k}"


tiles = pytest.mark.parametrize("form", EVERY_TILE, ids=tile_name)


def random_bits(n: int, k: int) -> Int4Groups:
    """Any words and any scale bits, NaN payloads too: moving data must not look at it."""
    words = torch.randint(-(2**31), 2**31, (n, k // 8)).to(torch.int32)
    return Int4Groups(words, torch.randint(-(2**15), 2**15, (n, k // 32)).to(torch.int16).view(torch.bfloat16))


def quantized(n: int, k: int) -> tuple[Tensor, Int4Groups]:
    """Codes q [n, k] int8 in -8..7, and the same packed by the library that writes the checkpoints."""
    q = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    return q, Int4Groups(pack_to_int32(q, 4), torch.randn(n, k // 32).bfloat16())


def same(a: Int4Groups, b: Int4Groups) -> bool:
    return torch.equal(a.words, b.words) and torch.equal(a.scales.view(torch.int16), b.scales.view(torch.int16))


def copied(w: Int4Groups) -> Int4Groups:
    return Int4Groups(w.words.clone(memory_format=torch.contiguous_format), w.scales.contiguous().clone())


@tiles
@pytest.mark.parametrize("count_n, count_k", COUNTS)
def test_int4_tile_round_trip_and_storage(form: Int4Tile, count_n: int, count_k: int) -> None:
    w = random_bits(count_n * form.tile_n, count_k * form.tile_k)
    stored = form.pack(w)
    assert same(form.unpack(stored, w.shape), w)
    codes, scales, padding = int4_slot(*w.shape)
    assert tuple(stored.shape) == form.storage(w.shape) == (codes + scales + padding,)
    assert stored.dtype == torch.int32 and stored.numel() * 4 % 4096 == 0
    assert not stored[codes + scales :].any()


@tiles
@pytest.mark.parametrize("axis", [0, 1])
def test_int4_tile_cuts_commute_with_packing(form: Int4Tile, axis: int) -> None:
    w = random_bits(4 * form.tile_n, 3 * form.tile_k)
    stored, granule = form.pack(w), form.granule(axis)
    count = w.shape[axis] // granule
    for first, last in [(0, 1), (1, 3), (count - 1, count), (0, count)]:
        low, high = first * granule, last * granule
        assert torch.equal(form.narrow(stored, w.shape, axis, low, high), form.pack(w.cut(axis, low, high)))


def place(n: Tensor, k: Tensor, columns: int, form: Int4Tile) -> tuple[Tensor, Tensor]:
    """Word of the slot and bit of the word that hold element (n, k): the formula of the layout, element by element."""
    groups = form.tile_k // 32
    slots, planes = min(groups, 4), max(1, groups // 4)
    width = 4 * slots
    g, r = k % form.tile_k // 32, k % 32
    pair = r // 2
    tile = n // form.tile_n * (columns // form.tile_k) + k // form.tile_k
    row_words = 4 * groups
    word = tile * form.tile_n * row_words + n % form.tile_n * row_words + pair % width * planes + g // 4
    return word, 4 * (g % 4 + slots * (pair // width)) + 16 * (r % 2)


def scale_place(n: Tensor, group: Tensor, columns: int, form: Int4Tile) -> Tensor:
    """Index into the slot's scales, counted in bf16 values from their first."""
    groups = form.tile_k // 32
    tile, g = n // form.tile_n * (columns // form.tile_k) + group // groups, group % groups
    row = n % form.tile_n
    inside = row if groups == 1 else 2 * (g // 2 * form.tile_n + row) + g % 2
    return tile * form.tile_n * groups + inside


@tiles
def test_int4_tile_map(form: Int4Tile) -> None:
    shape = 2 * form.tile_n, 2 * form.tile_k
    q, w = quantized(*shape)
    stored = form.pack(w).to(torch.int64)
    n, k = torch.meshgrid(torch.arange(shape[0]), torch.arange(shape[1]), indexing="ij")
    word, bit = place(n, k, shape[1], form)
    assert torch.equal((stored[word] >> bit & 15) - 8, q.to(torch.int64))
    codes, scales, _ = int4_slot(*shape)
    values = form.pack(w)[codes : codes + scales].view(torch.bfloat16)
    assert torch.equal(values[scale_place(n[:, ::32], k[:, ::32] // 32, shape[1], form)], w.scales)


def test_int4_tile_drawn_example() -> None:
    """The table in the docstring: word 2p + plane of a row, slots from the lowest, even inputs before odd."""
    drawn = [[0, 32, 64, 96, 1, 33, 65, 97], [128, 160, 192, 224, 129, 161, 193, 225]]
    drawn += [[2, 34, 66, 98, 3, 35, 67, 99], [130, 162, 194, 226, 131, 163, 195, 227]]
    for word, inputs in enumerate(drawn):
        q = torch.full((32, 256), -8, dtype=torch.int8)
        q[5, inputs] = torch.arange(-7, 1, dtype=torch.int8)
        stored = Int4Tile(32, 256).pack(Int4Groups(pack_to_int32(q, 4), torch.zeros(32, 8, dtype=torch.bfloat16)))
        assert stored.nonzero().flatten().tolist() == [5 * 32 + word]
        assert int(stored[5 * 32 + word]) & 0xFFFFFFFF == 0x87654321


def test_checkpoint_vector_and_lowest_code() -> None:
    q = torch.cat([torch.arange(-8, 8, dtype=torch.int8)] * 2).repeat(32, 1)
    w = Int4Groups(pack_to_int32(q, 4), torch.ones(32, 1, dtype=torch.bfloat16))
    assert [word & 0xFFFFFFFF for word in w.words[0].tolist()] == [0x76543210, 0xFEDCBA98] * 2
    form = Int4Tile(32, 32)
    assert same(form.unpack(form.pack(w), w.shape), w)
    codes = pack_to_int32(torch.full((256, 256), -8, dtype=torch.int8), 4)
    lowest = Int4Groups(codes, torch.ones(256, 8, dtype=torch.bfloat16))
    for tile in EVERY_TILE:
        stored = tile.pack(lowest)
        assert not stored[: 256 * 32].any() and same(tile.unpack(stored, (256, 256)), lowest)


@pytest.mark.parametrize("chunk_bytes", [1, 5000, 40_000, 1 << 30])
@pytest.mark.parametrize("form", [Int4Tile(32, 256), Int4Tile(256, 256), Int4Tile(64, 32)], ids=tile_name)
def test_int4_tile_is_the_same_in_any_chunks(form: Int4Tile, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, k in [(512, 512), (768, 256), (256, 1792)]:
        w = random_bits(n, k)
        expected = form.pack(w)
        with monkeypatch.context() as patch:
            patch.setattr(int4_tile, "CHUNK_BYTES", chunk_bytes)
            assert torch.equal(form.pack(w), expected) and same(form.unpack(expected, w.shape), w)


@tiles
def test_int4_tile_packs_strided_and_odd_cuts(form: Int4Tile) -> None:
    """A cut of the inputs is strided, and one that starts at an odd group has scales off a word's boundary."""
    whole = random_bits(form.tile_n + 1, 2 * form.tile_k + 64)
    w = whole.cut(0, 1, form.tile_n + 1).cut(1, 32, 2 * form.tile_k + 32)
    assert torch.equal(form.pack(w), form.pack(copied(w)))
    by_column = Int4Groups(w.words.t().contiguous().t(), w.scales.t().contiguous().t())
    assert torch.equal(form.pack(by_column), form.pack(w))


def test_int4_tile_packs_from_threads_and_into_stacks() -> None:
    form, experts = Int4Tile(64, 128), [random_bits(256, 1024) for _ in range(8)]
    stack = torch.full((8, *form.storage((256, 1024))), -1, dtype=torch.int32)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(form.pack_into, experts, stack))
        unpacked = list(pool.map(form.unpack, stack, [(256, 1024)] * 8))
    assert all(map(same, unpacked, experts))
    assert torch.equal(stack, torch.stack([form.pack(w) for w in experts]))


def test_fusing_rows_is_stacking_tiles() -> None:
    form, parts = Int4Tile(64, 64), [random_bits(128, 192) for _ in range(2)]
    stored = form.pack(Int4Groups.fuse(parts))
    assert torch.equal(form.narrow(stored, (256, 192), 0, 128, 256), form.pack(parts[1]))


@tiles
def test_off_granule_cuts_name_the_granule(form: Int4Tile) -> None:
    w = random_bits(2 * form.tile_n, 2 * form.tile_k)
    stored = form.pack(w)
    for axis in (0, 1):
        granule = form.granule(axis)
        outside = [(granule, 3 * granule), (-granule, granule)]
        for low, high in [(0, granule // 2), (1, granule), (granule, granule), *outside]:
            with pytest.raises(LayoutError, match=rf"granule {granule}\b"):
                form.narrow(stored, w.shape, axis, low, high)


def test_int4_tile_refuses_what_does_not_fit() -> None:
    form, w = Int4Tile(64, 64), random_bits(64, 64)
    for tile in (0, 16, 48, 512):
        with pytest.raises(LayoutError, match="256, 128, 64, 32"):
            Int4Tile(tile, 32)
    for shape in [(32, 64), (64, 96), (0, 64)]:
        with pytest.raises(LayoutError, match="not a multiple of 64"):
            form.storage(shape)
    with pytest.raises(LayoutError, match="is stored as"):
        form.unpack(form.pack(w)[1:], w.shape)
    with pytest.raises(LayoutError, match="int32"):
        form.unpack(form.pack(w).float(), w.shape)
    with pytest.raises(LayoutError, match="contiguous"):
        form.pack_into(w, torch.zeros(2 * form.storage(w.shape)[0], dtype=torch.int32)[::2])
    with pytest.raises(LayoutError, match="cannot hold"):
        Int4Tile.for_shape(64, 36)


def test_for_shape_takes_the_largest_tiles() -> None:
    assert Int4Tile.for_shape(4096, 7168) == Int4Tile(256, 256)
    assert Int4Tile.for_shape(7168, 2048 // 16) == Int4Tile(256, 128)
    assert Int4Tile.for_shape(96, 64) == Int4Tile(32, 64)


def test_layouts_are_found_by_id() -> None:
    for form in (Plain(), Int4Tile(64, 128)):
        assert layout(form.id, form.parameters) == form
    assert list(LAYOUTS) == ["plain.v1", "int4_tile.v1"]
    with pytest.raises(LayoutError, match=r"int4_tile\.v9.*plain\.v1, int4_tile\.v1"):
        layout("int4_tile.v9", {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
def test_plain_laws(dtype: torch.dtype) -> None:
    form, weight = Plain(), torch.randint(-99, 99, (6, 10, 4)).to(dtype)
    stored = form.pack(weight)
    assert torch.equal(form.unpack(stored, (6, 10, 4)), weight)
    assert tuple(stored.shape) == form.storage((6, 10, 4)) and stored.dtype == dtype
    for axis, (low, high) in product(range(3), [(0, 1), (1, 4), (2, 3)]):
        cut = weight.narrow(axis, low, high - low)
        assert torch.equal(form.narrow(stored, (6, 10, 4), axis, low, high), form.pack(cut))


@triton.jit
def load_everything(
    slot_ptr, codes_ptr, scales_ptr, N, K, TILE_N: tl.constexpr, TILE_K: tl.constexpr, BN: tl.constexpr
):
    """codes [N, K] int32 and scales [N, K/32] fp32, one program per BN rows and group."""
    n0, group = tl.program_id(0) * BN, tl.program_id(1)
    kt, g = group // (TILE_K // 32), group % (TILE_K // 32)
    rn = n0 + tl.arange(0, BN)
    q = load_codes(slot_ptr, n0, kt, g, N, K, TILE_N, TILE_K, BN)
    tl.store(codes_ptr + rn[:, None] * K + group * 32 + tl.arange(0, 32)[None, :], q)
    tl.store(scales_ptr + rn * (K // 32) + group, load_scales(slot_ptr, n0, kt, g, N, K, TILE_N, TILE_K, BN))


@tiles
@pytest.mark.parametrize("where", WHERE)
def test_int4_tile_device_load(form: Int4Tile, where: str) -> None:
    """Every code and scale the device reads is the logical one; two blocks a tile, two tiles each way."""
    n, k, rows = 2 * form.tile_n, 2 * form.tile_k, form.tile_n // 2
    q, w = quantized(n, k)
    slot = form.pack(w).to(where)
    codes = torch.full((n, k), 99, dtype=torch.int32, device=where)
    scales = torch.full((n, k // 32), float("nan"), device=where)
    load_everything[n // rows, k // 32](slot, codes, scales, n, k, form.tile_n, form.tile_k, rows)
    assert torch.equal(codes.cpu(), q.int())
    assert torch.equal(scales.cpu(), w.scales.float())
