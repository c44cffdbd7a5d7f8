"""Tuning tables: what is read, what counts, what is chosen, and what a damaged or foreign one says."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from runtime_min.bench import kernels as bench
from runtime_min.cli import main
from runtime_min.kernels import tuning
from runtime_min.kernels.cases import rotated
from runtime_min.kernels.choose import chooser, remarks
from runtime_min.kernels.index import KernelError
from runtime_min.kernels.linear.launch import Config, Problem
from runtime_min.kernels.moe_int4 import launch as moe
from runtime_min.kernels.moe_route.ref import Routing
from runtime_min.kernels.race import wanted
from runtime_min.kernels.tune import journal, recalled, standing
from runtime_min.kernels.tuning import Entry, Setting, TuningError
from specs import manifest
from specs.config import read_config
from specs.mesh import Mesh
from specs.schema import archs
from tests.fullsize import k26_config
from tests.lab import converted

ROOT = Path(__file__).parent.parent

SETTING = Setting(device="Card 1", arch="sm90", triton="9.9")
PROBLEM = Problem(n=512, k=7168, heads=1, tokens=4)
CONFIG = Config(bn=32, bk=128, split=7, warps=2)
ENTRY = Entry(problem=PROBLEM, config=CONFIG, us=2.0, spread=0.01, default_us=2.5, tried=9)
EXPERTS = moe.Problem(hidden=7168, width=256, here=384, top_k=8, tokens=4, gate_up=(256, 256), down=(256, 256))


def written(path: Path, *entries: Entry, weights: str = "") -> Path:
    path.write_bytes(tuning.sealed(SETTING, entries, weights))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    nested = Entry(problem=EXPERTS, config=EXPERTS.candidates()[-1], us=20.0, spread=0.0, default_us=20.0, tried=3)
    table = tuning.read(written(tmp_path / "t.json", ENTRY, nested))
    assert table.setting == SETTING and table.stale == ()
    assert table.configs() == {PROBLEM: CONFIG, EXPERTS: nested.config}
    assert written(tmp_path / "u.json", nested, ENTRY).read_bytes() == (tmp_path / "t.json").read_bytes()


def test_the_first_table_that_knows_decides_and_the_default_else(tmp_path: Path) -> None:
    other = replace(ENTRY, config=replace(CONFIG, warps=1))
    tables = [tuning.read(written(tmp_path / f"{i}.json", e)) for i, e in enumerate((ENTRY, other))]
    assert chooser("sm90", tables)(PROBLEM) == CONFIG
    assert chooser("sm90", tables[::-1])(PROBLEM) == other.config
    unknown = replace(PROBLEM, tokens=8)
    assert chooser("sm120", tables)(unknown) == unknown.default(archs()["sm120"]["shared_bytes"])


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The same table after a change, sealed again."""
    body = json.loads(path.read_text())
    body.pop("digest")
    change(body)
    digest = hashlib.sha256(manifest.canonical(body)).hexdigest()
    path.write_bytes(manifest.canonical({**body, "digest": digest}))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b["ops"]["linear"].update(source="0" * 64),
        lambda b: b["ops"]["linear"]["entries"][0]["config"].pop("warps"),
        lambda b: b["ops"]["linear"]["entries"][0]["config"].update(more=1),
        lambda b: b["ops"]["linear"]["entries"][0]["problem"].update(n="512"),
    ],
)
def test_another_kernel_s_timings_count_for_nothing(tmp_path: Path, change: Callable[[Any], object]) -> None:
    table = tuning.read(changed(written(tmp_path / "t.json", ENTRY), change))
    assert table.entries == () and table.stale == ("linear",)
    assert chooser("sm90", [table])(PROBLEM) == PROBLEM.default()
    assert "linear tuned with other device code" in remarks("Card 1", [table])[0]


def test_a_damaged_or_foreign_table_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", ENTRY, weights="a" * 64)
    assert tuning.read(path, "a" * 64).entries == (ENTRY,)
    with pytest.raises(TuningError, match=r"t\.json: belongs to weights aaaa"):
        tuning.read(path, "b" * 64)
    path.write_text(path.read_text().replace("7168", "7169"))
    with pytest.raises(TuningError, match=r"t\.json: was changed after sealing"):
        tuning.read(path, "a" * 64)
    path.write_text("{}")
    with pytest.raises(TuningError, match="is no kiln-tuning table"):
        tuning.read(path)


def test_an_artifact_s_table_comes_before_the_package_s(tmp_path: Path) -> None:
    (tmp_path / "tuning").mkdir()
    written(tmp_path / "tuning/card-1.json", ENTRY, weights="a" * 64)
    found = tuning.tables("sm90", tmp_path, "a" * 64)
    assert found[0].setting == SETTING and {t.path.parent for t in found[1:]} <= {tuning.TUNED}
    assert SETTING not in [t.setting for t in tuning.tables("sm80", tmp_path, "a" * 64)]


def test_a_device_without_a_table_says_so() -> None:
    assert remarks("Card 2", []) == ["no table for Card 2, default configs"]


@pytest.mark.parametrize("path", sorted(tuning.TUNED.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_tables_are_current_and_never_slower_than_the_default(path: Path) -> None:
    table = tuning.read(path)
    assert table.stale == () and len(table.entries) > 50
    assert all(e.us <= e.default_us for e in table.entries)
    limit = archs()[table.setting.arch]["shared_bytes"]
    assert all(e.config in [*e.problem.candidates(), e.problem.default(limit)] for e in table.entries)


def line(entry: Entry, **changes: Any) -> str:
    op = entry.problem.op
    row = {
        "op": op, "source": tuning.index.source_digest(op), "setting": asdict(SETTING),
        "problem": asdict(entry.problem), "config": asdict(entry.config), "us": entry.us, "spread": entry.spread,
        "default_us": entry.default_us, "tried": entry.tried, "timings": [],
    }  # fmt: skip
    return json.dumps(row | changes)


def test_a_journal_is_taken_up_where_it_was_torn(tmp_path: Path) -> None:
    path = journal(tmp_path / "t.json")
    stale = line(replace(ENTRY, problem=replace(PROBLEM, tokens=1)), source="0" * 64)
    foreign = line(replace(ENTRY, problem=replace(PROBLEM, tokens=2)), setting=asdict(replace(SETTING, triton="1")))
    path.write_text("\n".join([line(ENTRY), stale, foreign, line(ENTRY)[:50]]))
    assert recalled(path, SETTING) == {PROBLEM: ENTRY}
    assert recalled(tmp_path / "none.jsonl", SETTING) == {}


def test_what_a_table_says_about_anything_else_stays(tmp_path: Path) -> None:
    path = written(tmp_path / "t.json", ENTRY)
    assert standing(path, "", SETTING) == {PROBLEM: ENTRY}
    assert standing(path, "", replace(SETTING, triton="1")) == {}
    assert standing(changed(path, lambda b: b["ops"]["linear"].update(source="0" * 64)), "", SETTING) == {}
    assert standing(tmp_path / "none.json", "", SETTING) == {}


def test_inputs_rotate_past_the_cache() -> None:
    x = torch.arange(6.0).view(2, 3).T
    routing = Routing(torch.tensor([[3, 1]], dtype=torch.int32), torch.ones(1, 2))
    copies = rotated((x, routing, 7))
    assert len(copies) == 32
    for other, moved, number in copies[1:]:
        assert torch.equal(other, x) and other.stride() == x.stride() and other.data_ptr() != x.data_ptr()
        assert number == 7 and moved.ids.dtype == torch.int32 and len(set(moved.ids[0].tolist())) == 2
    assert len({tuple(c[1].ids[0].tolist()) for c in copies}) > 3


def kiln_run(*args: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "runtime_min", *map(str, args), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.gpu
def test_an_artifact_is_tuned_compiled_and_checked(demo: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "a"
    converted(demo, artifact)
    arch = "sm{}{}".format(*torch.cuda.get_device_capability())
    some = ("tune", artifact, "--op", "rmsnorm", "--op", "moe_route")
    first = kiln_run(*some)
    table = Path(first["table"])
    before, lines = table.read_bytes(), journal(table).read_text()
    assert first["left"] == 0 and kiln_run(*some)["cases"] == first["cases"]
    assert (table.read_bytes(), journal(table).read_text()) == (before, lines)
    assert kiln_run("tune", artifact, "--op", "rope_cache")["cases"] > first["cases"]
    kiln_run("compile", artifact, "--arch", arch)
    facts = kiln_run("doctor", artifact, "--device", "cuda")
    assert facts["ok"] and facts["launcher"] == "cubins" and facts["compiled"] == 0


@pytest.mark.gpu
def test_the_bench_refuses_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    dims = read_config(k26_config()).text
    wish = bench.Wish(dims=dims, mesh=Mesh(world=8, tp=8), ops=("moe_route",), gb_s=4650, tflops=795)
    assert bench.bench(wish, lambda *_: None)[0].us > 0
    monkeypatch.setattr(bench, "wanted", lambda case: replace_ids(wanted(case)))
    with pytest.raises(KernelError, match="a wrong kernel has no speed"):
        bench.bench(wish, lambda *_: None)


def replace_ids(found: Routing) -> Routing:
    return Routing(found.ids.flip(1), found.weights)


def test_tune_names_this_card_s_architecture_next(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever card it is; what is timed is another matter."""
    converted(demo, tmp_path / "a")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr("runtime_min.kernels.tune.tune", lambda tuning, progress: (3, 0))
    said = CliRunner().invoke(main, ["tune", str(tmp_path / "a")]).stdout
    assert said.splitlines()[-1] == f"next: kiln-run compile {tmp_path / 'a'} --arch sm120"
