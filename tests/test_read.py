"""Loading: every byte of every span in its place, whatever the block size, the number of threads or the order."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click import ClickException
from click.testing import CliRunner

from runtime_min import read
from runtime_min.artifact import Artifact, load
from runtime_min.bench import load as bench
from runtime_min.read import Span, blocks, fill
from specs.errors import ArtifactError
from tests.lab import converted

CPU = torch.device("cpu")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "BLOCK", 4096)
    monkeypatch.setattr(read, "MOST_PIECES", 5)


def spans(folder: Path, device: torch.device) -> tuple[list[Span], list[bytes]]:
    """Tensors of many sizes and dtypes over three files, some beside each other, some with gaps; and their bytes."""
    draw = random.Random(1)
    out: list[Span] = []
    want: list[bytes] = []
    for i in range(3):
        data, at = draw.randbytes(200_000), draw.randrange(100)
        path = folder / f"{i}.bin"
        path.write_bytes(data)
        for size in [0, 1, 2, 3, 4096, 8192, 50_000, *(draw.randrange(300) for _ in range(200))]:
            dtype = draw.choice([torch.bfloat16, torch.float32, torch.uint8])
            tensor = torch.zeros(size, dtype=dtype, device=device)
            n = size * tensor.element_size()
            if at + n > len(data):
                continue
            out.append(Span(path, at, tensor))
            want.append(data[at : at + n])
            at += n + draw.choice([0, 0, 0, 7])
    order = list(range(len(out)))
    draw.shuffle(order)
    return [out[i] for i in order], [want[i] for i in order]


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_every_byte_lands_where_it_belongs(small_blocks: None, tmp_path: Path, device: str, threads: int) -> None:
    given, want = spans(tmp_path, torch.device(device))
    phase = fill(given, torch.device(device), threads)
    assert [s.into.cpu().view(torch.uint8).numpy().tobytes() for s in given] == want
    assert phase.nbytes == sum(map(len, want)) and phase.seconds > 0 and "GB/s" in str(phase)


def test_blocks_are_large_sequential_and_cover_everything_once(small_blocks: None, tmp_path: Path) -> None:
    given, want = spans(tmp_path, CPU)
    made = blocks(given)
    assert all(0 < b.size <= 4096 and len(b.pieces) <= 5 for b in made)
    assert [(b.path, b.start) for b in made] == sorted((b.path, b.start) for b in made)
    assert sum(b.size for b in made) == sum(map(len, want))
    whole = torch.zeros(5, 4096, dtype=torch.uint8)
    (tmp_path / "w").write_bytes(bytes(5 * 4096))
    assert len(blocks([Span(tmp_path / "w", 0, row) for row in whole])) == 5


def test_short_reads_go_on_where_they_stopped(
    small_blocks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.preadv

    def halting(handle: int, views: list[memoryview], at: int) -> int:
        return whole(handle, [views[0][:777]], at)

    monkeypatch.setattr(os, "preadv", halting)
    given, want = spans(tmp_path, CPU)
    fill(given, CPU, 2)
    assert [s.into.view(torch.uint8).numpy().tobytes() for s in given] == want


def test_a_file_that_ends_early_or_is_gone_is_named(tmp_path: Path) -> None:
    given, _ = spans(tmp_path, CPU)
    os.truncate(tmp_path / "1.bin", 60_000)
    with pytest.raises(ArtifactError, match=r"1.bin: ends at byte 60000"):
        fill(given, CPU)
    (tmp_path / "2.bin").unlink()
    with pytest.raises(ArtifactError, match=r"2.bin: cannot be read"):
        fill(given, CPU)


def test_a_rank_loads_what_safetensors_reads(demo: Path, tmp_path: Path, device: str) -> None:
    """Stacks that are spread over several parts included."""
    from safetensors.torch import load_file

    converted(demo, tmp_path / "a", part_bytes=100_000, world=2, tp=2)
    for rank in range(2):
        artifact = Artifact.open(tmp_path / "a", rank)
        want: dict[str, list[torch.Tensor]] = {}
        for folder in ("common", f"rank-{rank:02d}"):
            for part in sorted((tmp_path / "a/weights" / folder).glob("*.safetensors")):
                for name, tensor in load_file(part).items():
                    want.setdefault(name, []).append(tensor)
        assert any(len(parts) > 1 for parts in want.values())
        found = artifact.weights(torch.device(device))
        assert found.keys() == want.keys()
        for name, parts in want.items():
            assert torch.equal(found[name].tensor.cpu(), torch.cat(parts)), name
        check, loaded = artifact.phases
        assert (check.name, loaded.name) == ("check", "read") and check.nbytes > loaded.nbytes > 1e6
        wide = artifact.weights(torch.device(device), torch.float32)
        assert {t.tensor.dtype for t in wide.values()} == {torch.float32, torch.int32}


def test_the_bench_proves_before_it_times(demo: Path, tmp_path: Path, device: str) -> None:
    converted(demo, tmp_path / "a", world=2, tp=2)
    arguments = [str(tmp_path / "a"), "--rank", "1", "--device", device, "--count", "1"]
    done = CliRunner().invoke(bench.main, [*arguments, "--result", str(tmp_path / "r/load")])
    assert done.exit_code == 0, done.output
    facts = json.loads((tmp_path / "r/load.json").read_text())
    assert {(r["state"], r["method"]) for r in facts["rows"]} >= {("cold", "raw read"), ("warm", "kiln")}
    assert all(r["seconds"] > 0 and r["of_raw"] > 0 for r in facts["rows"])
    part = next((tmp_path / "a/weights/rank-01").glob("*.safetensors"))
    index = json.loads((part.parent / "index.json").read_text())["tensors"]
    moved = [{**e, "path": part.parent / e["file"], "offset": e["offset"] + 2} for e in index]
    artifact = replace(Artifact.open(tmp_path / "a", 1), entries=tuple(moved[:3]))
    with pytest.raises(ClickException, match="was loaded wrongly, so no speed is printed"):
        bench.check_equal(artifact, torch.device(device))


def test_nothing_to_load_is_fine() -> None:
    loaded, phase = load([], CPU)
    assert not loaded and phase.nbytes == 0
