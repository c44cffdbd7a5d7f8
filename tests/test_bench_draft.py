"""The bench of drafts, run on the host at tiny sizes: what it measures, what it leaves, and what it launches."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime_min.bench.draft import Cases, bench, built, leave, plot, recorded, table
from runtime_min.bench.passes import DraftRow, EvenRow, Row, VerifyRow
from runtime_min.bench.steps import Card
from runtime_min.kernels.choose import chooser
from runtime_min.models.decoder import Settings
from runtime_min.models.shapes import random
from runtime_min.ops import REF
from specs.config import read_config
from specs.mesh import Mesh
from tests.engines import CPU, DIMS
from tests.fullsize import k26_config

CASES = Cases(verify=((1, False), (8, False), (8, True), (64, True)), contexts=(70, 130))
FACTS = {"card": "none"}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    how = Settings(dtype=torch.float32, device=CPU, positions=256)
    model, drafts = built(replace(DIMS, heads=4, moe_ff=64), Mesh(world=2, tp=2), random(CPU), REF, how)
    return list(bench(model, drafts, CASES, Card(gb_s=100.0, tflops=1.0)))


def test_every_part_is_measured(rows: list[Row]) -> None:
    verify = [r for r in rows if isinstance(r, VerifyRow)]
    assert [(r.context, r.tokens, r.tree) for r in verify] == [(c, *v) for c in CASES.contexts for v in CASES.verify]
    assert all(min(r.ms, r.mla_ms, r.moe_ms, r.mla_limit_ms, r.moe_limit_ms) > 0 for r in verify)
    drafts = {(r.kind, r.context): r for r in rows if isinstance(r, DraftRow)}
    assert len(drafts) == 8 and all(min(r.extend_ms, r.step_ms) > 0 for r in drafts.values())
    assert all((r.level_ms > 0) == (r.kind != "dflash") for r in drafts.values())


def test_a_round_is_the_sum_of_its_passes(rows: list[Row]) -> None:
    (verify,) = (r.ms for r in rows if isinstance(r, VerifyRow) and (r.context, r.tokens, r.tree) == (70, 8, False))
    (plain,) = (r.ms for r in rows if isinstance(r, VerifyRow) and (r.context, r.tokens) == (70, 1))
    for d in (r for r in rows if isinstance(r, DraftRow) and r.context == 70):
        steps = 1 if d.kind == "dflash" else 6
        mine = [r for r in rows if isinstance(r, EvenRow) and (r.kind, r.context) == (d.kind, 70)]
        assert [(r.drafted, r.tree) for r in mine] == [(7, False), (7, True), (63, True)]
        assert mine[0].ms == pytest.approx(d.extend_ms + steps * d.step_ms + verify)
        assert mine[0].accept_length == pytest.approx(mine[0].ms / plain)


def test_a_run_that_is_cut_short_leaves_what_it_had(rows: list[Row], tmp_path: Path) -> None:
    for count in range(1, len(rows) + 1):
        leave(tmp_path / "r", rows[:count], FACTS)
        assert len(json.loads((tmp_path / "r.json").read_text())["rows"]) == count
    text = (tmp_path / "r.md").read_text()
    assert "| 64 as a tree |" in text and "| eagle3.1-mla | 130 |" in text and text == table(rows, FACTS)


def test_the_drawing_is_the_same_for_the_same_rows(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        plot(rows, FACTS, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_kernels_of_the_release_are_known_ahead() -> None:
    """So that the card waits for no compiler: few, and trees' among them."""
    found = recorded(read_config(k26_config()).text, Mesh(world=8, tp=8), Cases(), chooser("sm90")).variants
    assert 30 < len(found) < 90
    assert {dict(v.constants).get("TREE") for v in found if v.kernel == "mla_decode.split"} == {True, False}
