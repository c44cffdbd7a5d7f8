"""A hub id as MODEL, against a hub on this machine: pinned, planned from headers, converted, refused in plain words."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub import COMMIT, Hub, hub

ROOT = Path(__file__).parent.parent


@pytest.fixture
def server(demo: Path) -> Iterator[Hub]:
    with hub(demo) as running:
        yield running


def kiln(server: Hub, home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its address when it is imported."""
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run([sys.executable, "-m", "convert", *args], env=env, cwd=home, capture_output=True, text=True)


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
