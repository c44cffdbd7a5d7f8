"""Files that lie: every kind of damage to a safetensors file is refused by name, and nothing hangs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from convert.readers.find import find
from convert.readers.safetensors_dir import SafetensorsDir
from convert.readers.safetensors_file import read_header
from specs.errors import InputError, SourceError


def good(path: Path) -> bytes:
    save_file({"a": torch.arange(12, dtype=torch.int32).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, path)
    return path.read_bytes()


def reheadered(data: bytes, change: Callable[[dict[str, dict[str, object]]], object]) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


def test_a_good_file_reads_as_the_library_reads_it(tmp_path: Path) -> None:
    good(tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert {n: (i.dtype, i.shape, i.stop - i.start) for n, i in header.items()} == {
        "a": ("I32", (3, 4), 48),
        "b": ("BF16", (5,), 10),
    }


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: b"", "0 bytes, too short"),
        (lambda d: d[:5], "5 bytes, too short"),
        (lambda d: b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", "git-lfs pointer"),
        (lambda d: (1 << 62).to_bytes(8, "little") + d[8:], "truncated or not a safetensors file"),
        (lambda d: d[:-1], "truncated, 1 bytes are missing"),
        (lambda d: d + b"zz", "2 bytes follow the last tensor"),
        (lambda d: d[:8] + b"{" * 40 + d[48:], "not valid JSON"),
        (
            lambda d: reheadered(d, lambda h: h["a"].update(data_offsets=[0, 44])),
            "a: data_offsets [0, 44] do not hold I32 [3, 4]",
        ),
        (lambda d: reheadered(d, lambda h: h["a"].update(data_offsets=[8, 56])), "starts at byte"),
        (lambda d: reheadered(d, lambda h: h["b"].update(data_offsets=[40, 50])), "overlaps the tensor before it"),
        (lambda d: reheadered(d, lambda h: h["a"].update(dtype="I3")), "a: dtype 'I3'"),
        (lambda d: reheadered(d, lambda h: h["a"].update(shape=[-3, -4])), "a: shape [-3, -4]"),
        (lambda d: reheadered(d, lambda h: h["a"].update(shape=[3.0, 4])), "a: shape [3.0, 4]"),
        (lambda d: reheadered(d, lambda h: h["a"].pop("dtype")), "expected dtype, shape and data_offsets"),
        (lambda d: reheadered(d, lambda h: h.update(__metadata__={"x": 1})), "__metadata__ is not a map of strings"),
        (lambda d: (lambda raw: len(raw).to_bytes(8, "little") + raw)(b"[" * 100_000), "not valid JSON"),
        (lambda d: (lambda raw: len(raw).to_bytes(8, "little") + raw)(b'{"a": 1, "a": 2}'), "'a' is there twice"),
        (lambda d: (lambda raw: len(raw).to_bytes(8, "little") + raw)(b"[]"), "header is a list"),
        (lambda d: (lambda raw: len(raw).to_bytes(8, "little") + raw)(b'"\xff"'), "not valid JSON"),
    ],
)
def test_damage_is_refused_by_file(tmp_path: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(damage(good(file)))
    with pytest.raises(SourceError) as caught:
        read_header(file)
    assert said in str(caught.value) and str(file) in str(caught.value)


def test_random_flips_in_a_header_never_crash(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    data = good(file)
    length = int.from_bytes(data[:8], "little")
    refused = 0
    for where, bit in zip(
        torch.randint(0, 8 + length, (1000,)).tolist(), torch.randint(0, 8, (1000,)).tolist(), strict=True
    ):
        flipped = bytearray(data)
        flipped[where] ^= 1 << bit
        file.write_bytes(flipped)
        try:
            read_header(file)
        except InputError:
            refused += 1
    assert refused > 500


def test_a_folder_without_an_index_is_read_whole(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(4)}, tmp_path / "two.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = SafetensorsDir(tmp_path)
    assert source.header == {"a": ("F32", (3,)), "b": ("F32", (4,))}
    assert source.rows("b", 1, 3).view(torch.float32).tolist() == [1.0, 1.0]


def test_every_damaged_file_is_listed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SourceError) as caught:
        SafetensorsDir(tmp_path)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": {"a": 1}}', "no map of strings"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "leads out of the folder"),
        ('{"weight_map": {"a": "y.safetensors"}}', "not there"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: str, said: str) -> None:
    good(tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SourceError, match=said):
        SafetensorsDir(tmp_path)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/no/such/folder", "does not exist"),
        ("./nothing", "does not exist"),
        ("just-a-name", "does not exist"),
        ("a/b/c", "does not exist"),
    ],
)
def test_a_model_that_is_nothing(model: str, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        find(model)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"config.json: cannot be read"):
        find(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"no \*.safetensors files"):
        find(str(tmp_path))
    (tmp_path / "config.json").write_text("nope")
    with pytest.raises(SourceError, match="not valid JSON"):
        find(str(tmp_path))
