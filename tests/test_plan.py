"""Plans of the real geometry: exact totals, cuts that tile every tensor, refusals with the legal values."""

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from convert.shard.plan import Plan, form, legal_values, plan, store, ways
from specs.config import read_config
from specs.errors import CutError
from specs.mesh import Mesh, cut
from specs.schema import load
from specs.storage import PAGE
from tests.fullsize import Header, k26_config, k26_header, write_sparse

SOURCE_BYTES = 595_148_192_736
SHAPE_LABELS = 552_960


@pytest.fixture(scope="module")
def header() -> Header:
    return k26_header()


def k26_plan(header: Header, **mesh: int) -> Plan:
    return plan(load("kimi_k2_6"), read_config(k26_config()), header, Mesh(**mesh))


@pytest.mark.parametrize(
    "mesh",
    [
        {"world": 8, "tp": 8},
        {"world": 8, "tp": 8, "ep": 8},
        {"world": 8, "tp": 8, "ep": 2},
        {"world": 16, "tp": 16, "ep": 4},
        {"world": 1},
        {"world": 64, "tp": 64, "ep": 64},
        {"world": 32, "tp": 32},
    ],
)
def test_every_byte_of_the_source_is_stored_once(header: Header, mesh: dict[str, int]) -> None:
    p = k26_plan(header, **mesh)
    stored = sum(p.data_bytes("rank", r) for r in range(p.mesh.world)) + p.data_bytes("common") + p.data_bytes("vision")
    assert p.source_bytes == SOURCE_BYTES
    assert stored == SOURCE_BYTES - SHAPE_LABELS
    assert len({p.data_bytes("rank", r) for r in range(p.mesh.world)}) == 1
    assert max(f.size for f in p.files) <= 5_000_000_000


def test_only_tiles_of_one_group_need_padding(header: Header) -> None:
    p = k26_plan(header, world=64, tp=64)
    stored = sum(p.data_bytes("rank", r) for r in range(64)) + p.data_bytes("common") + p.data_bytes("vision")
    assert stored == SOURCE_BYTES - SHAPE_LABELS + 64 * 60 * 384 * 2048


def test_tp_below_world_repeats_the_dense_cuts(header: Header) -> None:
    one, two = k26_plan(header, world=8, tp=8, ep=8), k26_plan(header, world=8, tp=4, ep=8)
    dense = sum(w.nbytes for j in one.jobs for w in j.store.get("rank", ()) if not w.form.stack)
    assert two.data_bytes("rank") - one.data_bytes("rank") == dense


def test_files_start_tensors_on_pages_and_hold_one_layer(header: Header) -> None:
    p = k26_plan(header, world=8, tp=8)
    assert len(p.jobs) == 63
    for file in p.files:
        assert len(file.header) % PAGE == 0
        sizes = [w.nbytes for w in file.work]
        aligned = [s % PAGE == 0 for s in sizes]
        assert aligned == sorted(aligned, reverse=True)
    experts = [w for w in p.jobs[7].files["rank", 3].work if w.form.stack]
    assert [w.item.name for w in experts] == ["layers.7.experts.down", "layers.7.experts.gate_up"]
    assert all(w.form.shape[1] * 4 % PAGE == 0 for w in experts)
    assert experts[1].form.parameters == {"tile_n": 256, "tile_k": 256}


def test_tiles_shrink_with_the_local_width(header: Header) -> None:
    tiles = {}
    for tp in (8, 16, 32, 64):
        works = k26_plan(header, world=tp, tp=tp).jobs[1].store["rank"]
        tiles[tp] = {w.item.name.split(".")[-1]: tuple(w.form.parameters.values()) for w in works if w.form.stack}
    assert tiles[8] == {"gate_up": (256, 256), "down": (256, 256)}
    assert tiles[16] == {"gate_up": (256, 256), "down": (256, 128)}
    assert tiles[32] == {"gate_up": (128, 256), "down": (256, 64)}
    assert tiles[64] == {"gate_up": (64, 256), "down": (256, 32)}


@pytest.mark.parametrize(
    "mesh", [{"world": 8, "tp": 4, "ep": 2}, {"world": 6, "tp": 2, "ep": 6}, {"world": 8, "tp": 8, "ep": 8}]
)
def test_the_boxes_of_all_ranks_tile_every_tensor(header: Header, mesh: dict[str, int]) -> None:
    m = Mesh(**mesh)
    p = k26_plan(header, **mesh)
    for family in {id(i.family): i.family for i in p.expanded.items}.values():
        if store(family, m) != "rank":
            continue
        axis, n = ways(family, m)
        groups = family.stack // form(family, m).stack if family.stack else 1
        held: dict[tuple[tuple[int, int], tuple[int, int]], int] = defaultdict(int)
        for rank in range(m.world):
            size = family.taken(0)[family.split_axis] if family.split_axis is not None else 1
            experts = cut(family.stack, groups, m.index("ep", rank) if groups > 1 else 0)
            held[experts, cut(size, n, m.index(axis, rank) if n > 1 else 0)] += 1
        assert len(held) == n * groups and len(set(held.values())) == 1


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"world": 3, "tp": 3}, "layers.{l}.attn.q_b: axis heads=64 over tp=3"),
        ({"world": 3, "tp": 3}, "legal for this model: tp 1, 2, 4, 8, 16, 32, 64"),
        ({"world": 5, "tp": 1, "ep": 5}, "layers.{m}.experts.gate_up: 384 e over ep=5 leaves 4 over"),
        ({"world": 7, "tp": 1, "ep": 7}, "leaves 6 over"),
        ({"world": 24, "tp": 8, "ep": 2}, "axis out=2048 over etp=12"),
    ],
)
def test_meshes_that_do_not_divide_the_model(header: Header, mesh: dict[str, int], said: str) -> None:
    with pytest.raises(CutError) as caught:
        k26_plan(header, **mesh)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "mesh", [{"world": 128, "tp": 128}, {"world": 8, "tp": 3}, {"world": 8, "ep": 5}, {"world": 0}]
)
def test_meshes_that_are_none(mesh: dict[str, int]) -> None:
    with pytest.raises(CutError):
        Mesh(**mesh)


def test_legal_values(header: Header) -> None:
    legal = legal_values(k26_plan(header, world=8, tp=8).expanded, 24)
    assert legal == {"tp": [1, 2, 4, 8, 16, 32, 64], "ep": [3, 6, 12, 24]}


def test_plan_of_the_full_checkpoint_needs_headers_only(header: Header, tmp_path: Path) -> None:
    folder = tmp_path / "a folder with spaces"
    write_sparse(folder, header, k26_config())
    assert sum(f.stat().st_size for f in folder.iterdir()) > 554 * 2**30
    code = (
        "import sys; from convert.cli import main; main(sys.argv[1:], standalone_mode=False);"
        "sys.stderr.write(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')))"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", str(folder), "--tp", "8", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - begin
    facts = json.loads(done.stdout)
    assert facts["source_bytes"] == SOURCE_BYTES and facts["source_tensors"] == 208_550
    assert len(facts["rank_bytes"]) == 8 and len(set(facts["rank_bytes"])) == 1
    assert sum(facts["rank_bytes"]) + facts["common_bytes"] == SOURCE_BYTES - SHAPE_LABELS
    assert facts["legal"] == {"tp": [1, 2, 4, 8, 16, 32, 64], "ep": [1, 2, 4, 8]}
    assert int(done.stderr.split()[1]) * 1024 < 1_000_000_000
    assert seconds < 60
