"""Conversion end to end on the demo checkpoint: every mesh proven, every fault refused by name."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors import safe_open

import convert.pipeline
import convert.shard.writer
from convert.demo.checkpoint import write_demo
from convert.demo.geometry import TINY
from convert.readers.find import find
from convert.repack.verify import verify
from convert.shard.journal import FOLDER, Journal
from runtime_min.kernels.layouts import layout
from specs.errors import InputError, OutputError, PlanError, SourceError
from tests.lab import Tensors, converted, copied, edit, planned, proven, shard_with, tree

EXPERT = "language_model.model.layers.1.mlp.experts.5."
MESHES = [
    {},
    {"world": 2, "tp": 2},
    {"world": 2, "tp": 1, "ep": 2},
    {"world": 4, "tp": 2, "ep": 2},
    {"world": 8, "tp": 8},
    {"world": 8, "tp": 8, "ep": 8},
    {"world": 8, "tp": 8, "ep": 2},
    {"world": 8, "tp": 4},
    {"world": 16, "tp": 8, "ep": 16},
]


@pytest.fixture(scope="session")
def digests() -> set[str]:
    return set()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_is_proven_and_has_the_same_logical_digest(
    demo: Path, tmp_path: Path, digests: set[str], mesh: dict[str, int]
) -> None:
    report = converted(demo, tmp_path / "out", **mesh)
    verdict = proven(tmp_path / "out", demo)
    assert verdict.problems == () and verdict.warnings == ()
    assert verdict.logical == report.logical
    digests.add(json.dumps(verdict.logical))
    assert len(digests) == 1


@pytest.mark.parametrize("mesh", MESHES[1::2], ids=str)
def test_an_artifact_reshards_to_what_a_direct_conversion_gives(
    demo: Path, tmp_path: Path, mesh: dict[str, int]
) -> None:
    converted(demo, tmp_path / "direct", world=8, tp=8, ep=2)
    converted(demo, tmp_path / "other", **mesh)
    converted(tmp_path / "other", tmp_path / "again", world=8, tp=8, ep=2)
    assert tree(tmp_path / "again") == tree(tmp_path / "direct")


def test_same_bytes_whatever_the_workers_and_small_parts_too(demo: Path, tmp_path: Path) -> None:
    for workers in (1, 3, 16):
        converted(demo, tmp_path / str(workers), workers=workers, part_bytes=300_000, world=2, tp=2)
    first = tree(tmp_path / "1")
    assert first == tree(tmp_path / "3") == tree(tmp_path / "16")
    assert len([n for n in first if n.startswith("weights/rank-00/part-")]) > 10
    assert proven(tmp_path / "1", demo).ok
    assert all(len(b) <= 300_000 + 4096 for n, b in first.items() if "experts.down" in n)


def stored(out: Path, rank: int, part: int, name: str) -> torch.Tensor:
    with safe_open(out / f"weights/rank-{rank:02d}/part-{part:02d}.safetensors", "pt") as f:
        tensor: torch.Tensor = f.get_tensor(name)
        return tensor


def source_tensor(folder: Path, name: str) -> torch.Tensor:
    with safe_open(shard_with(folder, name), "pt") as f:
        tensor: torch.Tensor = f.get_tensor(name)
        return tensor


def test_dense_cuts_are_the_rows_and_columns_of_the_source(demo: Path, tmp_path: Path) -> None:
    """Read with the safetensors library, cut by hand: not through any code of ours."""
    converted(demo, tmp_path / "out", world=2, tp=2)
    prefix = "language_model.model.layers.1.self_attn."
    heads, nope = TINY.heads, TINY.qk_nope
    q_b = source_tensor(demo, f"{prefix}q_b_proj.weight").view(heads, -1, TINY.q_lora)
    kv_b = source_tensor(demo, f"{prefix}kv_b_proj.weight").view(heads, -1, TINY.kv_lora)
    o = source_tensor(demo, f"{prefix}o_proj.weight").view(TINY.hidden, heads, -1)
    shared = [
        source_tensor(demo, f"language_model.model.layers.1.mlp.shared_experts.{p}_proj.weight") for p in ("gate", "up")
    ]
    for rank in range(2):
        mine = slice(rank * heads // 2, (rank + 1) * heads // 2)
        assert torch.equal(stored(tmp_path / "out", rank, 1, "layers.1.attn.q_b"), q_b[mine])
        assert torch.equal(stored(tmp_path / "out", rank, 1, "layers.1.attn.w_uk"), kv_b[mine, :nope])
        assert torch.equal(stored(tmp_path / "out", rank, 1, "layers.1.attn.w_uv"), kv_b[mine, nope:])
        assert torch.equal(stored(tmp_path / "out", rank, 1, "layers.1.attn.o"), o[:, mine])
        halves = [p.chunk(2)[rank] for p in shared]
        assert torch.equal(stored(tmp_path / "out", rank, 1, "layers.1.shared.gate_up"), torch.cat(halves))


def unpacked(out: Path, rank: int, name: str, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8) and scales of one stored expert, codes read by the compressed-tensors library."""
    index = json.loads((out / f"weights/rank-{rank:02d}/index.json").read_text())
    entry = next(e for e in index["tensors"] if e["name"] == name)
    how = {k: v for k, v in entry["layout"].items() if k != "id"}
    rows, k = sum(s[0] for s in entry["logical"]), entry["logical"][0][1]
    part = int(entry["file"].removesuffix(".safetensors").removeprefix("part-"))
    found = layout(entry["layout"]["id"], how).unpack(stored(out, rank, part, name)[expert], (rows, k))
    return unpack_from_int32(found.words, 4, torch.Size((rows, k))), found.scales


def codes(folder: Path, stem: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape = torch.Size(source_tensor(folder, f"{stem}.weight_shape").tolist())
    return unpack_from_int32(source_tensor(folder, f"{stem}.weight_packed"), 4, shape), source_tensor(
        folder, f"{stem}.weight_scale"
    )


def test_expert_cuts_keep_every_code_and_scale_gate_first(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "out", world=4, tp=4, ep=2)
    expert, rank = 13, 3
    gate, up, down = (
        codes(demo, f"language_model.model.layers.2.mlp.experts.{expert}.{p}_proj") for p in ("gate", "up", "down")
    )
    for i in range(2):
        want = torch.cat([gate[i].chunk(2)[1], up[i].chunk(2)[1]])
        assert torch.equal(unpacked(tmp_path / "out", rank, "layers.2.experts.gate_up", expert - 8)[i], want)
        assert torch.equal(
            unpacked(tmp_path / "out", rank, "layers.2.experts.down", expert - 8)[i], down[i].chunk(2, 1)[1]
        )
    assert -8 in gate[0]


def test_twelve_experts_stay_in_numeric_order(tmp_path: Path) -> None:
    """As text, experts.10 sorts before experts.2."""
    write_demo(tmp_path / "model", replace(TINY, experts=12, top_k=2))
    converted(tmp_path / "model", tmp_path / "out", world=2, tp=2)
    for expert in range(12):
        want = codes(tmp_path / "model", f"language_model.model.layers.1.mlp.experts.{expert}.down_proj")[0].chunk(
            2, 1
        )[1]
        assert torch.equal(unpacked(tmp_path / "out", 1, "layers.1.experts.down", expert)[0], want)


@pytest.mark.parametrize("dialect", ["k2.5", "k2-thinking", "k2.7-code"])
def test_relatives_are_read_by_the_same_rows(tmp_path: Path, dialect: str) -> None:
    write_demo(tmp_path / "model", TINY, dialect=dialect)
    converted(tmp_path / "model", tmp_path / "out", world=2, tp=2, ep=2)
    assert proven(tmp_path / "out", tmp_path / "model").ok


def refused(model: Path, out: Path, *said: str) -> None:
    """Conversion fails, says so, and leaves nothing that looks finished."""
    with pytest.raises(InputError) as caught:
        converted(model, out, world=2, tp=2)
    for text in said:
        assert text in str(caught.value)
    assert not (out / "manifest.json").exists()
    assert not list(out.rglob("*.part"))


def set_bits(name: str, index: int, bits: int) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(torch.int16).flatten()[index] = bits

    return change


@pytest.mark.parametrize(("bits", "said"), [(0x7FC0, "nan"), (0x7F80, "inf"), (-0x8000 + 0x3F80, "-1.0")])
def test_a_bad_scale_is_refused_with_its_place(demo: Path, tmp_path: Path, bits: int, said: str) -> None:
    model, name = copied(demo, tmp_path / "model"), f"{EXPERT}up_proj.weight_scale"
    edit(model, name, set_bits(name, 9, bits))
    refused(model, tmp_path / "out", name, "1 scales are negative or not finite", said, "row 1, group 1")


def test_a_zero_scale_is_kept_and_reported(demo: Path, tmp_path: Path) -> None:
    model, name = copied(demo, tmp_path / "model"), f"{EXPERT}up_proj.weight_scale"
    edit(model, name, set_bits(name, 9, 0))
    report = converted(model, tmp_path / "out", world=2, tp=2)
    assert report.warnings == ("1 scales are zero; their groups of 32 weights are zero too",)
    assert proven(tmp_path / "out", model).ok


def test_a_shape_label_that_lies_is_refused(demo: Path, tmp_path: Path) -> None:
    model, name = copied(demo, tmp_path / "model"), f"{EXPERT}down_proj.weight_shape"
    edit(model, name, lambda t: t.update({name: torch.tensor([64, 32], dtype=torch.int32)}))
    refused(model, tmp_path / "out", name, "holds [64, 32]", "expected [256, 256]")


def test_missing_and_extra_tensors_are_refused_by_name(demo: Path, tmp_path: Path) -> None:
    model, name = copied(demo, tmp_path / "model"), f"{EXPERT}down_proj.weight_scale"
    edit(model, name, lambda t: (t.pop(name), t.update({"foo.bar": torch.zeros(2)})))
    refused(model, tmp_path / "out", f"{name}: missing", "foo.bar: unexpected F32 [2]")


def test_a_scale_of_another_dtype_is_refused(demo: Path, tmp_path: Path) -> None:
    model, name = copied(demo, tmp_path / "model"), f"{EXPERT}down_proj.weight_scale"
    edit(model, name, lambda t: t.update({name: t[name].half()}))
    refused(model, tmp_path / "out", f"{name}: found F16 [256, 8], expected BF16 [256, 8]")


def test_index_and_files_must_agree(demo: Path, tmp_path: Path) -> None:
    model, name = copied(demo, tmp_path / "model"), f"{EXPERT}down_proj.weight_scale"
    file = shard_with(model, name)
    edit(model, name, lambda t: t.update({"language_model.model.norm.weight": torch.ones(4)}), reindex=False)
    refused(model, tmp_path / "out", "language_model.model.norm.weight: is in two files", file.name)
    model = copied(demo, tmp_path / "model2")
    edit(model, name, lambda t: t.pop(name), reindex=False)
    refused(
        model, tmp_path / "out", f"{name}: model.safetensors.index.json maps it to {file.name}, which does not hold it"
    )
    model = copied(demo, tmp_path / "model3")
    shard_with(model, name).unlink()
    refused(model, tmp_path / "out", f"{file.name}: named by model.safetensors.index.json but not there")


def test_links_and_spaces_in_a_hub_cache(demo: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "a cache" / "models--someone--A-Model" / "snapshots" / ("c0ffee" * 7)[:40]
    snapshot.mkdir(parents=True)
    for file in demo.iterdir():
        (snapshot / file.name).symlink_to(file)
    converted(snapshot, tmp_path / "out dir", world=2, tp=2)
    assert proven(tmp_path / "out dir", snapshot).ok
    source = json.loads((tmp_path / "out dir" / "manifest.json").read_text())["source"]
    assert (source["repo"], source["revision"]) == ("someone/A-Model", snapshot.name)


def test_side_files_come_along_byte_for_byte(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "out", world=2, tp=2)
    for name in (
        "config.json",
        "generation_config.json",
        "tiktoken.model",
        "chat_template.jinja",
        "LICENSE",
        "preprocessor_config.json",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (demo / name).read_bytes()


CHILD = """
import os, signal, sys
from pathlib import Path
import convert.shard.writer as writer
from tests.lab import converted
calls, limit, real = [0], int(sys.argv[3]), writer.write_all
def dying(handle, data):
    calls[0] += 1
    if calls[0] == limit:
        real(handle, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    real(handle, data)
writer.write_all = dying
converted(sys.argv[1], Path(sys.argv[2]), workers=2, world=4, tp=4, ep=2)
print(calls[0])
"""


def child(demo: Path, out: Path, limit: int) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", CHILD, str(demo), str(out), str(limit)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.mark.parametrize("points", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_anywhere_a_rerun_gives_the_same_bytes(demo: Path, tmp_path: Path, points: int) -> None:
    whole = child(demo, tmp_path / "whole", 0)
    calls = int(whole.stdout)
    want = tree(tmp_path / "whole")
    for limit in torch.randint(1, calls, (points,), generator=torch.Generator().manual_seed(points)).tolist():
        out = tmp_path / f"killed-{limit}"
        assert child(demo, out, limit).returncode == -signal.SIGKILL
        assert not (out / "manifest.json").exists()
        finished = [p for p in out.rglob("*.safetensors")]
        converted(demo, out, world=4, tp=4, ep=2)
        assert tree(out) == want
        assert all(p.exists() for p in finished)


def test_a_small_file_that_could_not_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.shard.writer, "write_all", full)
    with pytest.raises(OutputError, match="No space left on device"):
        convert.shard.writer.write_file(tmp_path / "job.json", b"{}")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_a_clear_error_and_no_final_names(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = convert.shard.writer.write_all, [0]

    def full(handle: int, data: memoryview) -> None:
        calls[0] += 1
        if calls[0] > 40:
            raise OSError(28, "No space left on device")
        real(handle, data)

    monkeypatch.setattr(convert.shard.writer, "write_all", full)
    with pytest.raises(OutputError, match=r"No space left on device.*run the same command again"):
        converted(demo, tmp_path / "out", world=4, tp=4)
    monkeypatch.undo()
    assert not list((tmp_path / "out").rglob("*.part")) and not (tmp_path / "out/manifest.json").exists()
    complete = {f.path: f.size for f in planned(demo, world=4, tp=4).files}
    for path in (tmp_path / "out").rglob("*.safetensors"):
        assert path.stat().st_size == complete[str(path.relative_to(tmp_path / "out"))]
    report = converted(demo, tmp_path / "out", world=4, tp=4)
    assert proven(tmp_path / "out", demo).ok and report.files == len(complete)


def test_room_is_checked_before_anything_is_read(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = convert.pipeline.peak_memory(2)
    monkeypatch.setattr(convert.pipeline, "available_memory", lambda: need - 2**30)
    with pytest.raises(PlanError, match=r"memory: 2 workers may need 2.15 GB, 1.07 GB are available.*fewer --workers"):
        converted(demo, tmp_path / "out", world=2, tp=2)
    monkeypatch.undo()
    monkeypatch.setattr(convert.pipeline.shutil, "disk_usage", lambda p: type("U", (), {"free": 10**6}))
    with pytest.raises(PlanError, match=r"disk: .*needs 0.08 GB more, 0.00 GB are free"):
        converted(demo, tmp_path / "out", world=2, tp=2)
    assert not list((tmp_path / "out").rglob("*.safetensors*"))


def test_the_output_folder_is_never_overwritten(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "out", world=2, tp=2)
    assert converted(demo, tmp_path / "out", world=2, tp=2).already_there
    with pytest.raises(PlanError, match="finished artifact of another source, mesh or version"):
        converted(demo, tmp_path / "out", world=4, tp=4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(PlanError, match="is not empty"):
        converted(demo, tmp_path / "mine", world=2, tp=2)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_an_unfinished_folder_belongs_to_its_plan_and_its_writer(demo: Path, tmp_path: Path) -> None:
    made, source = planned(demo, world=2, tp=2), find(str(demo))
    journal = Journal(tmp_path / "out", f"{made.digest}\n{source.state}\n")
    with pytest.raises(PlanError, match="another conversion is writing there"):
        converted(demo, tmp_path / "out", world=2, tp=2)
    journal.close()
    with pytest.raises(PlanError, match="unfinished conversion of another source, mesh or version"):
        converted(demo, tmp_path / "out", world=4, tp=4)
    model = copied(demo, tmp_path / "model")
    os.utime(next(model.glob("*.safetensors")), (1, 1))
    with pytest.raises(PlanError, match="unfinished conversion of another source"):
        converted(model, tmp_path / "out", world=2, tp=2)
    assert converted(demo, tmp_path / "out", world=2, tp=2).files
    assert not (tmp_path / "out" / FOLDER).exists()


MEMORY = """
import sys
from pathlib import Path
import convert.repack.engine as engine
from convert.pipeline import peak_now
from tests.lab import converted
engine.PIECE_BYTES = 8 << 20
before = peak_now()
converted(sys.argv[1], Path(sys.argv[2]), workers=2, world=4, tp=4)
print(peak_now() - before)
"""


def test_memory_in_flight_is_bounded_whatever_the_size_of_the_source(tmp_path: Path) -> None:
    """520 MB of experts through pieces of 8 MiB: a child's peak grows by the budget and some slack."""
    wide = replace(TINY, hidden=2048, moe_ff=1024, experts=72, layers=3, weights="filler")
    write_demo(tmp_path / "model", wide)
    size = sum(p.stat().st_size for p in (tmp_path / "model").glob("*.safetensors"))
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "model"), str(tmp_path / "out")]
    grown = int(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)
    assert size > 520_000_000
    assert grown < 2 * 2 * (8 << 20) + 160_000_000


def test_phases_are_timed_apart(demo: Path, tmp_path: Path) -> None:
    report = converted(demo, tmp_path / "out", world=2, tp=2)
    assert {"read", "check", "repack", "hash", "write", "sync", "seal"} <= set(report.wall)
    assert report.bytes_read >= 7_000_000 and report.peak_bytes > 0


def test_a_source_that_shrinks_while_being_read_is_an_error(demo: Path, tmp_path: Path) -> None:
    model = copied(demo, tmp_path / "model")
    source = find(str(model))
    made = planned(model, world=2, tp=2)
    file = shard_with(model, f"{EXPERT}down_proj.weight_scale")
    os.truncate(file, 100_000)
    with pytest.raises(SourceError, match=r"the file ends at byte \d+; it changed"):
        convert.pipeline.convert(made, source, tmp_path / "out", 2)
    assert not (tmp_path / "out/manifest.json").exists()


def test_quick_verify_reads_no_tensor(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "out", world=2, tp=2)
    file = tmp_path / "out/weights/rank-01/part-02.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert verify(tmp_path / "out", "quick").ok
    verdict = verify(tmp_path / "out", "full")
    assert len(verdict.problems) == 1 and "rank-01/part-02.safetensors: sha256" in verdict.problems[0]
