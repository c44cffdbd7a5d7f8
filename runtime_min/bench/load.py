"""Loading one rank's weights against a raw read of the same files and against other loaders, cold and warm.

Cold: the files' pages are dropped before each run. Warm: everything was just read. Methods take turns within a round.
A speed is printed only if every tensor is, bit for bit, what safetensors reads.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import safe_open
from torch import Tensor

from runtime_min.artifact import Artifact, check_files, load
from runtime_min.bench.report import page, write
from runtime_min.read import BLOCK, THREADS

Method = Callable[[], object]
RAW = "raw read"


def raw(files: list[Path], threads: int) -> None:
    """Every byte of the files front to back into one buffer a thread, a file at a time for each thread."""

    def one(file: Path) -> None:
        buffer = memoryview(bytearray(BLOCK))
        with file.open("rb", buffering=0) as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while f.readinto(buffer):
                pass

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, files))


def by_safetensors(files: list[Path], device: torch.device) -> list[Tensor]:
    """On a CPU its tensors are views of the mapped file, of which nothing is read yet; hence the copy."""
    out: list[Tensor] = []
    for file in files:
        with safe_open(file, "pt", device=str(device)) as f:
            found = [f.get_tensor(name) for name in f.keys()]  # noqa: SIM118
            out += [t.clone() for t in found] if device.type == "cpu" else found
    return out


def by_fastsafetensors(files: list[Path], device: torch.device, threads: int) -> list[Tensor]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    where = "cuda:0" if device.type == "cuda" else "cpu"
    loader = SafeTensorsFileLoader(SingleGroup(), where, max_threads=threads, nogds=True)
    loader.add_filenames({0: [str(f) for f in files]})
    buffers = loader.copy_files_to_device()
    out = [buffers.get_tensor(name).clone() for name in buffers.key_to_rank_lidx]
    buffers.close()
    loader.close()
    return out


def drop(files: Iterable[Path]) -> None:
    """Forgets the files' cached pages."""
    for file in files:
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(method: Method, device: torch.device) -> float:
    """Seconds of one run; what it made is given back before the clock of the next one starts."""
    begin = time.perf_counter()
    kept = method()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    del kept
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return seconds


def check_equal(artifact: Artifact, device: torch.device) -> None:
    """ClickException unless every stored tensor is what safetensors reads from its file."""
    loaded, _ = load(artifact.entries, device)
    for e in artifact.entries:
        with safe_open(e["path"], "pt", device=str(device)) as f:
            want = f.get_tensor(e["name"])
        start = e.get("start", 0)
        mine = loaded[e["name"]].tensor[start : start + e["shape"][0]]
        if not torch.equal(mine.view(torch.uint8), want.view(torch.uint8)):
            raise click.ClickException(f"{e['path']}: {e['name']} was loaded wrongly, so no speed is printed")


def methods(artifact: Artifact, files: list[Path], device: torch.device, threads: int) -> dict[str, Method]:
    records = [f for f in artifact.manifest["files"] if artifact.path / f["path"] in files]

    def checked() -> object:
        check_files(artifact.path, records, verify=True)
        return load(artifact.entries, device, threads)

    out: dict[str, Method] = {
        RAW: lambda: raw(files, threads),
        "kiln": lambda: load(artifact.entries, device, threads),
        "kiln, sha256 first": checked,
        "safetensors": lambda: by_safetensors(files, device),
    }
    if find_spec("fastsafetensors") is not None:
        out["fastsafetensors"] = lambda: by_fastsafetensors(files, device, threads)
    return out


def table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    head = ["| state | method | seconds | slowest | GB/s | of the raw read's time |", "|---|---|--:|--:|--:|--:|"]
    lines = [
        f"| {r['state']} | {r['method']} | {r['seconds']:.2f} | {max(r['rounds']):.2f} | {r['gb_s']:.2f} | "
        f"{r['of_raw']:.2f} |"
        for r in rows
    ]
    note = (
        "Medians of the rounds. Equal bit for bit before timing. The raw read uses one buffer over and over; loading "
        "for a CPU fills fresh memory, whose first touch takes longer than a warm read."
    )
    return page("Loading one rank", facts, [*head, *lines], note)


def measured(ways: dict[str, Method], files: list[Path], device: torch.device, count: int) -> list[dict[str, Any]]:
    size = sum(f.stat().st_size for f in files)
    rows = []
    for state in ("cold", "warm"):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(count):
            for name, method in ways.items():
                if state == "cold":
                    drop(files)
                seconds[name].append(timed(method, device))
        base = statistics.median(seconds[RAW])
        for name, rounds in seconds.items():
            median = statistics.median(rounds)
            row = {"state": state, "method": name, "seconds": median, "gb_s": size / 1e9 / median, "rounds": rounds}
            rows.append({**row, "of_raw": median / base})
    return rows


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="ARTIFACT")
@click.option("--rank", default=0)
@click.option("--device", "kind", type=click.Choice(["cpu", "cuda"]), default="cuda")
@click.option("--threads", default=THREADS, help="Of every method that takes a number.")
@click.option("--count", default=3, help="Rounds in each state.")
@click.option("--result", type=click.Path(path_type=Path), default=None, help="Where to write NAME.json and NAME.md.")
def main(folder: Path, rank: int, kind: str, threads: int, count: int, result: Path | None) -> None:
    """Measure how fast one rank of ARTIFACT loads on this machine."""
    device = torch.device(kind)
    artifact = Artifact.open(folder, rank, verify=False)
    files = sorted({e["path"] for e in artifact.entries})
    check_equal(artifact, device)
    rows = measured(methods(artifact, files, device, threads), files, device, count)
    facts = {
        "device": torch.cuda.get_device_name() if kind == "cuda" else platform.machine(),
        "cores": len(os.sched_getaffinity(0)), "files": len(files),
        "GB": round(sum(f.stat().st_size for f in files) / 1e9, 2), "mesh": str(artifact.mesh), "threads": threads,
        "torch": torch.__version__, "safetensors": version("safetensors"),
        "fastsafetensors": version("fastsafetensors") if find_spec("fastsafetensors") is not None else "not installed",
        "Python": platform.python_version(), "command": "python -m runtime_min.bench.load " + " ".join(sys.argv[1:]),
    }  # fmt: skip
    text = table(rows, facts)
    click.echo(text)
    if result is not None:
        result.parent.mkdir(parents=True, exist_ok=True)
        write(result, text, facts, rows)


if __name__ == "__main__":
    main()
