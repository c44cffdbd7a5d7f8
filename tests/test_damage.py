"""Damaged inputs of every kind: always refused in words or harmless, never a traceback, a hang or a sealed lie."""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import convert.pipeline
from convert.probe.probe import Question, probe
from convert.readers.find import find
from convert.readers.join import file_problems, join, weight_map
from convert.readers.safetensors_dir import SafetensorsDir
from convert.readers.safetensors_file import parse_header
from convert.readers.sealed import read_sealed
from convert.readers.source import TensorInfo
from convert.readers.strict_json import parse_object
from convert.repack.verify import verify
from convert.shard.journal import FOLDER
from convert.shard.plan import plan
from specs import manifest
from specs.config import read_config
from specs.errors import ArtifactError, InputError, SourceError
from specs.expand import check_header, expand
from specs.mesh import Mesh
from specs.schema import load
from tests.lab import converted, copied, edit, proven, shard_with, tree

MESH = {"world": 2, "tp": 2}
EXPERT = "language_model.model.layers.1.mlp.experts.5."
INDEX = "model.safetensors.index.json"
FLIPS = 1000


@pytest.fixture(scope="module")
def sealed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sealed") / "artifact"
    converted(demo, out, **MESH)
    return out


def flips(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """The data with one random bit turned over, again and again."""
    draw = random.Random(seed)
    for _ in range(count):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        yield bytes(changed)


def accepted(action: Callable[[], object]) -> bool:
    """Whether an action goes through; an InputError is a refusal, anything else fails the test."""
    try:
        action()
    except InputError as e:
        assert e.problems and all(p.strip() for p in e.problems)
        return False
    return True


def stated(source: SafetensorsDir, raw: bytes) -> None:
    """What probe and convert do with a config.json; a plan only where it states another model than the true one."""
    config = read_config(parse_object("config.json", raw))
    if config != read_config(source.config):
        plan(load("kimi_k2_6"), config, source.header, Mesh(**MESH))


def test_flips_in_headers_are_refused_or_change_names_only(demo: Path) -> None:
    """A thousand flips: the file refuses them, or the table of tensors does, or only metadata or blanks changed."""
    file, source = shard_with(demo, f"{EXPERT}down_proj.weight_scale"), SafetensorsDir(demo)
    raw, size = file.read_bytes(), file.stat().st_size
    length = int.from_bytes(raw[:8], "little")
    mine = {n for n, t in source.tensors.items() if t.file == str(file)}
    rest = {n: s for n, s in source.header.items() if n not in mine}
    expanded = expand(load("kimi_k2_6"), read_config(source.config), source.header)
    survived = 0
    for changed in flips(raw[8 : 8 + length], FLIPS, seed=1):

        def read(changed: bytes = changed) -> None:
            tensors, _ = parse_header(str(file), changed, size)
            check_header(expanded, rest | {n: (t.dtype, t.shape) for n, t in tensors.items()})
            assert {n: t[:2] for n, t in tensors.items()} == {n: source.tensors[n][:2] for n in mine}

        survived += accepted(read)
    assert survived < FLIPS / 100


def test_flips_in_the_length_of_a_header_are_refused(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    file = shard_with(model, f"{EXPERT}down_proj.weight_scale")
    raw = file.read_bytes()
    for at in range(64):
        changed = bytearray(raw[:8])
        changed[at // 8] ^= 1 << at % 8
        file.write_bytes(bytes(changed) + raw[8:])
        with pytest.raises(SourceError, match=file.name):
            SafetensorsDir(model)


def test_flips_in_config_are_refused_or_harmless(demo: Path) -> None:
    source = SafetensorsDir(demo)
    for changed in flips((demo / "config.json").read_bytes(), FLIPS, seed=2):
        accepted(lambda changed=changed: stated(source, changed))


def test_flips_in_the_index_are_refused(demo: Path, tmp_path: Path) -> None:
    source, whole = SafetensorsDir(demo), json.loads((demo / INDEX).read_bytes())
    present = {p.name for p in demo.glob("*.safetensors")}
    headers: dict[str, dict[str, TensorInfo]] = {p: {} for p in present}
    for tensor, info in source.tensors.items():
        headers[Path(info.file).name][tensor] = info
    for changed in flips((demo / INDEX).read_bytes(), FLIPS, seed=5):
        try:
            mapped = weight_map(INDEX, parse_object(INDEX, changed))
        except SourceError:
            continue
        differ = [*file_problems(str(demo), mapped, present), *join(headers, mapped)[1]]
        assert differ or mapped == whole["weight_map"]


def test_flips_in_a_manifest_are_always_refused(sealed: Path, tmp_path: Path) -> None:
    raw = (sealed / manifest.NAME).read_bytes()
    for changed in flips(raw, FLIPS, seed=3):
        (tmp_path / manifest.NAME).write_bytes(changed)
        try:
            found = manifest.read(tmp_path)
        except ArtifactError:
            continue
        assert manifest.canonical(found) != changed, "a changed manifest passed for the sealed one"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    copy = json.loads(json.dumps(value))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return copy


STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    10**18,
    10**400,
    1.5,
    float("inf"),
    float("nan"),
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
]


def test_config_fields_of_any_type_are_refused_in_words(demo: Path) -> None:
    source = SafetensorsDir(demo)
    for path in leaves(source.config):
        for value in STRANGE:
            raw = json.dumps(replaced(source.config, path, value)).encode()
            accepted(lambda raw=raw: stated(source, raw))


def body_of(artifact: Path) -> dict[str, Any]:
    """A manifest without what `manifest.sealed` adds."""
    whole = json.loads((artifact / manifest.NAME).read_text())
    return {k: v for k, v in whole.items() if k not in ("format", "version", "digest")}


def test_manifest_fields_of_any_type_are_refused_in_words(sealed: Path, tmp_path: Path) -> None:
    """Even under a digest that fits: readers look at every field before they use it."""
    folder = copied(sealed, tmp_path / "artifact")
    body = body_of(sealed)
    draw = random.Random(4)
    cases = [(p, v) for p in leaves(body) for v in STRANGE]
    for path, value in draw.sample(cases, 150):
        (folder / manifest.NAME).write_bytes(manifest.sealed(replaced(body, path, value)))
        accepted(lambda: find(str(folder)).close())
        accepted(lambda: verify(folder, "quick"))


@pytest.mark.parametrize("count", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_index_fields_of_any_type_are_refused_in_words(sealed: Path, tmp_path: Path, count: int) -> None:
    """An index.json that lies under digests that fit, down to the unpacking of every tensor."""
    folder = copied(sealed, tmp_path / "artifact")
    where = "weights/rank-00/index.json"
    index, body = json.loads((sealed / where).read_text()), body_of(sealed)
    record = next(f for f in body["files"] if f["path"] == where)
    draw = random.Random(6)
    cases = [(p, v) for p in leaves(index) for v in STRANGE]
    for path, value in draw.sample(cases, count):
        raw = json.dumps(replaced(index, path, value)).encode()
        (folder / where).write_bytes(raw)
        record |= {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        (folder / manifest.NAME).write_bytes(manifest.sealed(body))
        accepted(lambda: verify(folder, "full"))


def truncated(model: Path) -> None:
    file = shard_with(model, SCALE)
    os.truncate(file, file.stat().st_size - 1)


def trailing(model: Path) -> None:
    with shard_with(model, SCALE).open("ab") as f:
        f.write(b"zz")


def pointer(model: Path) -> None:
    shard_with(model, SCALE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")


def absurd_length(model: Path) -> None:
    file = shard_with(model, SCALE)
    file.write_bytes((1 << 62).to_bytes(8, "little") + file.read_bytes()[8:])


def overlapping(model: Path) -> None:
    file = shard_with(model, SCALE)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    low, high = header[SCALE]["data_offsets"]
    header[SCALE]["data_offsets"] = [low - 64, high - 64]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def a_pipe(model: Path) -> None:
    shard_with(model, SCALE).unlink()
    os.mkfifo(shard_with(model, SCALE))


def a_folder(model: Path) -> None:
    shard_with(model, SCALE).unlink()
    shard_with(model, SCALE).mkdir()


def stating(**fields: object) -> Callable[[Path], None]:
    """config.json with other values of the text model."""

    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        config["text_config"] |= fields
        (model / "config.json").write_text(json.dumps(config))

    return change


def grouped_by_64(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    groups = config["text_config"]["quantization_config"]["config_groups"]
    next(iter(groups.values()))["weights"]["group_size"] = 64
    (model / "config.json").write_text(json.dumps(config))


def with_zero_points(model: Path) -> None:
    edit(model, SCALE, lambda t: t.update({f"{EXPERT}down_proj.weight_zero_point": torch.zeros(4, dtype=torch.int32)}))


SCALE = f"{EXPERT}down_proj.weight_scale"
SEEN_IN_HEADERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a scale is missing": (lambda m: edit(m, SCALE, lambda t: t.pop(SCALE)), "tensors", f"{SCALE}: missing"),
    "the index disagrees": (lambda m: edit(m, SCALE, lambda t: t.pop(SCALE), reindex=False), "access", SCALE),
    "a file is missing": (lambda m: shard_with(m, SCALE).unlink(), "access", "not there; download it again"),
    "groups of 64": (grouped_by_64, "config", "group_size: found 64, only 32 is supported"),
    "zero points": (with_zero_points, "tensors", "weight_zero_point: unexpected"),
    "a half-precision scale": (
        lambda m: edit(m, SCALE, lambda t: t.update({SCALE: t[SCALE].half()})),
        "tensors",
        "found F16",
    ),
    "a stray tensor": (lambda m: edit(m, SCALE, lambda t: t.update({"foo.bar": torch.ones(2)})), "tensors", "foo.bar"),
    "truncated": (truncated, "access", "truncated, 1 bytes are missing"),
    "trailing bytes": (trailing, "access", "2 bytes follow the last tensor"),
    "a pointer": (pointer, "access", "git-lfs pointer"),
    "an absurd header length": (absurd_length, "access", "truncated or not a safetensors file"),
    "overlapping offsets": (overlapping, "access", "overlaps the tensor before it"),
    "a pipe": (a_pipe, "access", "is not a file"),
    "a folder": (a_folder, "access", "is not a file"),
    "an empty file": (lambda m: shard_with(m, SCALE).write_bytes(b""), "access", "0 bytes, too short"),
    "no config": (lambda m: (m / "config.json").unlink(), "access", "config.json: cannot be read"),
    "a billion layers": (stating(num_hidden_layers=10**9), "config", "1000000000 layers"),
    "a billion experts": (stating(n_routed_experts=10**9), "config", "1000000000 experts"),
    "more layers than there are": (stating(num_hidden_layers=4), "tensors", "layers.3.input_layernorm.weight: missing"),
    "another width": (
        stating(moe_intermediate_size=128),
        "tensors",
        "found BF16 [256, 256], expected BF16 [128, 256]",
    ),
}


@pytest.mark.parametrize("case", SEEN_IN_HEADERS)
def test_what_headers_show_stops_probe_and_convert(demo: Path, tmp_path: Path, case: str) -> None:
    damage, where, said = SEEN_IN_HEADERS[case]
    model = copied(demo, tmp_path / "model")
    damage(model)
    mesh = Mesh(**MESH)
    lines = probe(Question(model=str(model), mesh=mesh, arch="sm90", out=tmp_path / "out", workers=2))
    stopped = next(line for line in lines if line.verdict == "no-go")
    assert stopped.name == where and said in " ".join(stopped.facts["problems"]) and stopped.do
    with pytest.raises(InputError):
        converted(model, tmp_path / "out", **MESH)
    assert not (tmp_path / "out").exists()


def test_a_damaged_journal_record_is_done_again(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ended before the seal: one record is cut short, one has a flipped byte, one is empty."""
    out = tmp_path / "out"

    def stopped(*_: object) -> dict[str, str]:
        raise RuntimeError("stopped")

    monkeypatch.setattr(convert.pipeline, "seal", stopped)
    with pytest.raises(RuntimeError, match="stopped"):
        converted(demo, out, **MESH)
    monkeypatch.undo()
    records = sorted((out / FOLDER).glob("job-*.json"))
    kept = records[0].read_bytes()
    for record, damaged in zip(records, (kept[:-9], kept[:80] + b"~" + kept[81:], b""), strict=False):
        record.write_bytes(damaged)
    assert converted(demo, out, **MESH).resumed_jobs == len(records) - 3 > 0
    converted(demo, tmp_path / "whole", **MESH)
    assert tree(out) == tree(tmp_path / "whole") and proven(out, demo).ok


def test_a_folder_without_a_seal_is_never_an_artifact(sealed: Path, tmp_path: Path) -> None:
    folder = copied(sealed, tmp_path / "artifact")
    (folder / manifest.NAME).rename(folder / "manifest.json.part")
    for action in (lambda: verify(folder, "quick"), lambda: find(str(folder)), lambda: read_sealed(folder)):
        assert not accepted(action)
