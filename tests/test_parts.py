"""One conversion shared out to several processes: the bytes of a single run, whoever is killed and when."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from convert.cli import main
from convert.pipeline import convert, job_bytes, last, ordered
from convert.readers.safetensors_dir import SafetensorsDir
from convert.shard.journal import FOLDER, Journal
from specs import manifest
from specs.errors import OutputError, PlanError
from tests.lab import converted, planned, tree

ROOT = Path(__file__).parent.parent
MESH = {"world": 2, "tp": 2}
PART_BYTES = 200_000

CHILD = """
import sys, time
from pathlib import Path
import torch
from convert.pipeline import convert
from convert.readers.safetensors_dir import SafetensorsDir
from tests.lab import planned
from tests.test_parts import MESH, PART_BYTES

class Slow(SafetensorsDir):
    def rows(self, name, low, high):
        time.sleep(0.01)
        return super().rows(name, low, high)

model, out, index, count = sys.argv[1:]
made = planned(model, PART_BYTES, **MESH)
report = convert(made, Slow(Path(model)), Path(out), 1, part=(int(index), int(count)))
print("waiting" if report.waiting else "sealed", report.bytes_written)
"""


def test_shares_are_disjoint_and_together_are_all(demo: Path) -> None:
    jobs = planned(demo, PART_BYTES, **MESH).jobs
    assert len(jobs) > 6 and ordered(jobs, None) == sorted(jobs, key=job_bytes, reverse=True)
    orders = [ordered(jobs, (i, 3)) for i in (1, 2, 3)]
    assert all(sorted(j.number for j in order) == [j.number for j in jobs] for order in orders)
    own = [order[: len(jobs) // 3] for order in orders]
    assert len({j.number for share in own for j in share}) == 3 * (len(jobs) // 3)
    sizes = [sum(map(job_bytes, share)) for share in own]
    assert max(sizes) < 2 * min(sizes)


def test_a_job_is_taken_once_and_free_again_when_its_taker_is_gone(demo: Path, tmp_path: Path) -> None:
    made = planned(demo, PART_BYTES, **MESH)
    mine, theirs = (Journal(tmp_path, "key", shared=True) for _ in range(2))
    job, other = made.jobs[:2]
    draft = tmp_path / f"{next(iter(job.files.values())).path}.0123.part"
    draft.parent.mkdir(parents=True)
    draft.touch()
    assert mine.take(job) and not theirs.take(job) and theirs.take(other) and not draft.exists()
    with pytest.raises(PlanError, match="another conversion is writing there"):
        Journal(tmp_path, "key")
    theirs.close()
    assert mine.take(other)
    for file in job.files.values():
        (tmp_path / file.path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file.path).write_bytes(b"x")
    mine.record(job, {"files": {f.path: {"size": 1} for f in job.files.values()}})
    third = Journal(tmp_path, "key", shared=True)
    assert not third.take(job)
    third.close()
    mine.close()
    alone = Journal(tmp_path, "key")
    with pytest.raises(PlanError, match="another conversion is writing there"):
        Journal(tmp_path, "key", shared=True)
    alone.close()


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(OutputError, match="the file system has no locks"):
        Journal(tmp_path, "key", shared=True)


def test_one_part_alone_finishes_everything(demo: Path, tmp_path: Path) -> None:
    """What nobody has taken is anybody's; a part that comes late finds the artifact there."""
    made = planned(demo, PART_BYTES, **MESH)
    first = convert(made, SafetensorsDir(demo), tmp_path / "a", 2, part=(2, 3))
    late = convert(made, SafetensorsDir(demo), tmp_path / "a", 2, part=(3, 3))
    assert first.waiting == 0 and first.logical and late.already_there
    converted(demo, tmp_path / "b", part_bytes=PART_BYTES, **MESH)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_what_others_hold_is_left_to_them(demo: Path, tmp_path: Path) -> None:
    made, source = planned(demo, PART_BYTES, **MESH), SafetensorsDir(demo)
    out = tmp_path / "a"
    other = Journal(out, f"{made.digest}\n{source.state}\n", shared=True)
    assert other.take(made.jobs[3])
    report = convert(made, source, out, 2, part=(1, 2))
    assert report.waiting == 1 and not report.logical and not (out / "manifest.json").exists()
    assert not (out / made.jobs[3].files["rank", 0].path).exists()
    other.close()
    assert convert(made, source, out, 2, part=(1, 2)).logical and not (out / FOLDER).exists()


def test_a_part_that_was_away_while_another_sealed_does_nothing_more(demo: Path, tmp_path: Path) -> None:
    """Whether the other has already cleared the journal away, is just doing so, or was killed before it did."""
    made, source, out = planned(demo, PART_BYTES, **MESH), SafetensorsDir(demo), tmp_path / "a"
    away = [Journal(out, f"{made.digest}\n{source.state}\n", shared=True) for _ in range(2)]
    assert convert(made, source, out, 2, part=(1, 2)).logical
    before = tree(out)
    assert not away[0].take(made.jobs[0])
    with away[0].sealing():
        assert last(made, source, out, away[0], "")[0] == manifest.read(out)["logical"]
    (out / FOLDER).mkdir()
    assert not any(away[1].take(job) for job in made.jobs)
    with away[1].sealing():
        assert last(made, source, out, away[1], "")[2] == 0
    assert tree(out) == before


def child(demo: Path, out: Path, index: int, count: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", CHILD, str(demo), str(out), str(index), str(count)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 8))])
def test_three_processes_killed_at_random_end_with_the_bytes_of_a_single_run(
    demo: Path, tmp_path: Path, seed: int
) -> None:
    """Each is killed once while files are open, and started again; at the end all have returned without an error."""
    draw, out = random.Random(seed), tmp_path / "shared"
    running = {i: child(demo, out, i, 3) for i in (1, 2, 3)}
    killed = open_files = 0
    for index in draw.sample([1, 2, 3], 3):
        while not list(out.rglob("*.safetensors.*.part")) and running[index].poll() is None:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.3))
        open_files += len(list(out.rglob("*.safetensors.*.part")))
        running[index].send_signal(signal.SIGKILL)
        killed += running[index].wait() == -signal.SIGKILL
        running[index] = child(demo, out, index, 3)
    ends = {i: (p.communicate()[1], p.returncode) for i, p in running.items()}
    assert all(code == 0 for _, code in ends.values()), ends
    if not (out / "manifest.json").exists():
        assert child(demo, out, 1, 3).wait() == 0
    converted(demo, tmp_path / "single", part_bytes=PART_BYTES, **MESH)
    assert killed >= 2 and open_files > 0
    assert tree(out) == tree(tmp_path / "single")


def test_processes_of_a_part_take_jobs_themselves(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from convert.repack import pool

    monkeypatch.setattr(pool, "LEAST_BYTES", 1)
    made, source, out = planned(demo, **MESH), SafetensorsDir(demo), tmp_path / "a"
    other = Journal(out, f"{made.digest}\n{source.state}\n", shared=True)
    assert other.take(made.jobs[0])
    report = convert(made, source, out, 8, part=(1, 2))
    assert report.waiting == 1 and report.bytes_read == sum(map(job_bytes, made.jobs[1:]))
    other.close()
    convert(made, source, out, 8, part=(2, 2))
    converted(demo, tmp_path / "b", **MESH)
    assert tree(out) == tree(tmp_path / "b")


def test_wrong_parts_are_wrong_usage(demo: Path, tmp_path: Path) -> None:
    for part in ("0/3", "4/3", "3", "a/b", "1/", "-1/2"):
        result = CliRunner().invoke(main, ["convert", str(demo), "--out", str(tmp_path / "a"), "--part", part])
        assert result.exit_code == 2 and "expected I/N" in result.stderr
    result = CliRunner().invoke(
        main, ["convert", str(demo), "--tp", "2", "--out", str(tmp_path / "a"), "--part", "1/2"]
    )
    assert result.exit_code == 0 and (tmp_path / "a/manifest.json").exists()
