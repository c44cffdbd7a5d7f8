"""A hub id as MODEL, against a hub on this machine: pinned, planned from headers, converted, refused in plain words."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub import COMMIT, Hub, hub, kiln
from tests.lab import copied, edit, shard_with


@pytest.fixture
def server(demo: Path) -> Iterator[Hub]:
    with hub(demo) as running:
        yield running


def test_plan_reads_headers_and_convert_pins_the_commit(server: Hub, demo: Path, tmp_path: Path) -> None:
    done = kiln(server, tmp_path, "plan", "someone/model@main", "--tp", "2", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["source"] == {"repo": "someone/model", "revision": COMMIT}
    assert facts["source_tensors"] == 366
    total = sum(p.stat().st_size for p in demo.glob("*.safetensors"))
    assert server.sent < total / 4
    done = kiln(server, tmp_path, "convert", "someone/model", "--tp", "2", "--out", "out")
    assert done.returncode == 0, done.stderr
    source = json.loads((tmp_path / "out/manifest.json").read_text())["source"]
    assert (source["repo"], source["revision"]) == ("someone/model", COMMIT)
    assert kiln(server, tmp_path, "verify", "out", "--against", str(demo)).returncode == 0


def test_refusals_are_said_plainly(server: Hub, tmp_path: Path) -> None:
    for model, said in (("someone/nothing", "no such repository"), ("someone/model@v9", "no such revision")):
        done = kiln(server, tmp_path, "plan", model)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
    server.gated = True
    done = kiln(server, tmp_path, "plan", "someone/model")
    assert done.returncode == 1 and "gated; accept its terms" in done.stderr
    server.shutdown()
    server.server_close()
    done = kiln(server, tmp_path, "plan", "someone/model")
    assert done.returncode == 1 and "the hub could not be read" in done.stderr and "Traceback" not in done.stderr


def probed(server: Hub, home: Path, model: str = "someone/model") -> tuple[int, dict[str, dict[str, Any]]]:
    done = kiln(server, home, "probe", model, "--tp", "2", "--json")
    assert "Traceback" not in done.stderr and done.stdout, done.stderr
    return done.returncode, {line["name"]: line for line in json.loads(done.stdout)["lines"]}


def test_probe_reads_headers_only_and_says_what_it_read(server: Hub, demo: Path, tmp_path: Path) -> None:
    code, lines = probed(server, tmp_path, "someone/model@main")
    total = sum(p.stat().st_size for p in demo.glob("*.safetensors"))
    assert code == 0 and lines["access"]["facts"]["revision"] == COMMIT
    assert 0 < int(lines["access"]["facts"]["header_bytes"]) <= server.sent < total / 4
    assert lines["disk"]["facts"]["download_bytes"] == total and not lines["time"]["facts"]["disk_measured"]
    assert lines["licence"]["facts"]["files"] == ["LICENSE"] and lines["tokenizer"]["verdict"] == "go"
    assert kiln(server, tmp_path, "convert", "someone/model", "--tp", "2", "--out", "out").returncode == 0
    assert probed(server, tmp_path)[1]["disk"]["facts"]["download_bytes"] == 0


def test_probe_says_plainly_whether_the_token_reaches_the_model(server: Hub, tmp_path: Path) -> None:
    code, lines = probed(server, tmp_path, "someone/nothing")
    assert code == 1 and "no such repository, or your token may not see it" in lines["access"]["found"]
    server.gated = True
    code, lines = probed(server, tmp_path)
    assert code == 1 and "gated; accept its terms" in lines["access"]["found"]
    assert lines["tensors"]["found"] == "not known" and lines["packages"]["verdict"] == "go"


def test_weights_are_gated_even_where_the_listing_is_not(server: Hub, tmp_path: Path) -> None:
    server.gated_files = True
    code, lines = probed(server, tmp_path)
    assert code == 1 and "gated; accept its terms" in lines["access"]["found"]


def test_an_illegal_mesh_is_refused_before_anything_is_downloaded(server: Hub, demo: Path, tmp_path: Path) -> None:
    done = kiln(server, tmp_path, "convert", "someone/model", "--tp", "3", "--out", "out")
    assert done.returncode == 1 and "legal for this model" in done.stderr
    assert server.sent < sum(p.stat().st_size for p in demo.glob("*.safetensors")) / 4


def test_damage_on_the_hub_is_found_without_downloading_it(demo: Path, tmp_path: Path) -> None:
    """The client's own reader of headers passes over all of these."""
    scale = "language_model.model.layers.1.mlp.experts.5.down_proj.weight_scale"
    cases: dict[str, Callable[[Path], object]] = {
        "truncated, 1 bytes are missing": lambda f: f.write_bytes(f.read_bytes()[:-1]),
        "1 bytes follow the last tensor": lambda f: f.write_bytes(f.read_bytes() + b"x"),
        "git-lfs pointer": lambda f: f.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n"),
        "0 bytes, too short": lambda f: f.write_bytes(b""),
        "not there; download it again": lambda f: f.unlink(),
    }
    for i, (said, damage) in enumerate(cases.items()):
        model = copied(demo, tmp_path / f"model-{i}")
        damage(shard_with(model, scale))
        with hub(model) as running:
            code, lines = probed(running, tmp_path / f"model-{i}")
        assert code == 1 and said in " ".join(lines["access"]["facts"]["problems"])
    model = copied(demo, tmp_path / "other")
    edit(model, scale, lambda t: t.pop(scale), reindex=False)
    with hub(model) as running:
        _, lines = probed(running, tmp_path)
    assert "which does not hold it" in lines["access"]["found"]


def test_a_server_that_ignores_ranges_is_refused(server: Hub, tmp_path: Path) -> None:
    server.ranges = False
    code, lines = probed(server, tmp_path)
    assert code == 1 and "ignores byte ranges" in lines["access"]["found"]
