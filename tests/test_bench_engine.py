"""The engine's bench, run on the host at tiny sizes: what it measures, what it leaves, and its limits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime_min.bench.engine import Cases, bench, leave, plot, table
from runtime_min.bench.floors import decode_work, prefill_flops
from runtime_min.bench.steps import Card, DecodeRow, OpRow, Resized
from runtime_min.kernels.mla_decode.launch import Config, Problem
from runtime_min.models.shapes import of_dims
from specs.config import read_config
from specs.mesh import Mesh
from tests.engines import tiny
from tests.fullsize import k26_config

CARD = Card(gb_s=100.0, tflops=1.0)
CASES = Cases(
    decode=((1, 64), (3, 64)), ops=((1, 64),), paged=((2, 64),), pages=(16, 64), prefill=((50, 16), (50, 64))
)  # fmt: skip
FACTS = {"card": "none", "layers": "2"}


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    return list(bench(tiny(), CASES, CARD))


def test_every_part_is_measured(rows: list[Any]) -> None:
    assert [type(r).__name__ for r in rows if type(r) is not OpRow] == [
        "DecodeRow", "DecodeRow", "PageRow", "PageRow", "PrefillRow", "PrefillRow",
    ]  # fmt: skip
    calls = {r.op: r.calls for r in rows if type(r) is OpRow}
    # Two layers, the first of them dense; one norm before them, two sums and norms in each, and the head.
    assert calls == {
        "rmsnorm": 1, "add_rmsnorm": 4, "linear": 8, "norm_linear": 2, "silu_linear": 2, "heads_linear": 4, "route": 1,
        "rope_cache": 2, "mla_decode": 2, "moe_int4": 1,
    }  # fmt: skip
    assert all(r.ms > 0 and r.limit_ms > 0 for r in rows if type(r) is OpRow)
    first = rows[0]
    assert min(first.ms, first.device_ms, first.graph_ms) > 0 and 0 <= first.idle < 1
    assert first.bytes_ms == pytest.approx(decode_work(tiny().dims, Mesh(), 1, 64).bytes / 1e8)


def test_a_run_that_is_cut_short_leaves_what_it_had(rows: list[Any], tmp_path: Path) -> None:
    for count in range(1, len(rows) + 1):
        leave(tmp_path / "r", rows[:count], FACTS)
        found = json.loads((tmp_path / "r.json").read_text())
        assert len(found["rows"]) == count and found["rows"][0]["part"] == "decode"
    text = (tmp_path / "r.md").read_text()
    assert "| mla_decode | 2 | " in text and "| between and outside ops |" in text and "| 2 | 64 | 16 | " in text
    assert "| 50 | 16 | " in text and text == table(rows, FACTS)


def test_the_parts_of_a_step_add_up_to_it(rows: list[Any]) -> None:
    lines = table(rows, FACTS).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| op |")) + 2
    cells = [line.strip("| ").split(" | ") for line in lines[start : lines.index("", start)]]
    *parts, step = [float(c[-4]) for c in cells]
    assert cells[-1][0] == "the step" and sum(parts) == pytest.approx(step, abs=0.01)


def test_the_drawing_is_the_same_for_the_same_rows(rows: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        plot(rows, FACTS, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    plot([r for r in rows if type(r) is DecodeRow], FACTS, tmp_path / "a.svg")


def test_limits_of_the_release() -> None:
    """Bytes of a rank's weights but for the embedding and the experts that nobody chose; flops of its parameters."""
    dims = read_config(k26_config()).text
    mesh = Mesh(world=8, tp=8)
    every = decode_work(dims, mesh, 1 << 20, 1)
    cached = (1 << 20) * 61 * 576 * 2
    shapes = of_dims(dims, mesh, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), torch.bfloat16)
    stored = sum(s.tensor.numel() * s.tensor.element_size() for name, s in shapes.items() if name != "embed")
    assert every.bytes - cached == pytest.approx(stored, rel=1e-3)
    one = decode_work(dims, mesh, 1, 1)
    # Of some 32.6 billion active parameters the embedding multiplies nothing; latents and router are whole on a rank.
    whole = 61 * (1536 + 576) * 7168 + 60 * 384 * 7168
    assert one.flops / 2 == pytest.approx((32.6e9 - 163840 * 7168 - whole) / 8 + whole, rel=0.02)
    assert prefill_flops(dims, mesh, 1) == pytest.approx(one.flops - 2 * 163840 * 7168 / 8, rel=0.01)
    assert decode_work(dims, mesh, 8, 8192).bytes > 3 * decode_work(dims, mesh, 1, 8192).bytes


def test_page_sizes_are_compared_at_equal_shares() -> None:
    class Fixed:
        compiled = 0

        def pick(self, problem: Any) -> Config:
            assert problem.page_tokens == 64
            return Config(pages=4, ring=5)

        def run(self, launch: Any) -> None:
            raise AssertionError(launch)

    problem = Problem(heads=8, queries=1, sequences=1, latent=512, rope=64, page_tokens=16)
    kernels = Resized(Fixed())
    found = [kernels.pick(replace(problem, page_tokens=n)) for n in (16, 32, 64, 128, 1024)]
    assert [(c.pages, c.ring) for c in found] == [(16, 0), (8, 0), (4, 5), (2, 0), (1, 0)]
