"""Convert throughput against `cp` of the same files: `python -m convert.bench`.

A checkpoint of full-size matrices (layer 0, one or more mixture-of-experts layers, embedding, head, vision tower) is
converted and copied in alternating rounds, every file fsynced in both. Cold: the source's cached pages are dropped
before each. Warm: the source was just read. A speed is printed only if the artifact proves equal to the source.
"""

import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from convert.demo.checkpoint import write_demo
from convert.demo.geometry import k26

PHASES = ("read", "check", "repack", "hash", "write", "sync")
RESULTS = Path("benchmarks/results")
Row = dict[str, Any]


def drop(folder: Path) -> None:
    """Writes everything back, and forgets the cached pages of a folder's files."""
    os.sync()
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def copy(model: Path, out: Path) -> float:
    """Seconds for cp of the folder and fsync of every copied file."""
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", str(model), str(out)], check=True)
    for file in out.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - begin


def convert(model: Path, out: Path, workers: int, mesh: list[str]) -> Row:
    """One conversion in a process of its own; its report, and seconds from outside: with Python's and torch's start."""
    command = [
        sys.executable,
        "-m",
        "convert",
        "convert",
        str(model),
        "--out",
        str(out),
        "--workers",
        str(workers),
        "--json",
        *mesh,
    ]
    begin = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: Row = json.loads(done.stdout)
    del report["artifact"]
    return {**report, "process_seconds": time.perf_counter() - begin}


def check(model: Path, out: Path) -> None:
    command = [sys.executable, "-m", "convert", "verify", str(out), "--against", str(model), "--json"]
    verdict = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)
    if not verdict["ok"]:
        raise click.ClickException(
            f"the artifact differs from its source, so no speed is printed: {verdict['problems'][:3]}"
        )


def rounds(model: Path, scratch: Path, workers: int, mesh: list[str], count: int, cold: bool) -> Iterator[Row]:
    """`count` alternating pairs of cp and convert."""
    copied, out = scratch / "copy", scratch / "artifact"
    for _ in range(count):
        row: Row = {"cold": cold, "workers": workers, "mesh": " ".join(mesh)}
        for kind in ("cp", "convert"):
            for folder in (copied, out):
                shutil.rmtree(folder, ignore_errors=True)
            os.sync()
            if cold:
                drop(model)
            if kind == "cp":
                row["cp_seconds"] = copy(model, copied)
            else:
                row["report"] = convert(model, out, workers, mesh)
        yield row


def groups(
    model: Path, scratch: Path, workers: list[int], mesh: list[str], count: int, states: tuple[str, ...]
) -> Iterator[list[Row]]:
    """One run of each number of workers but the last, which races cp in every state."""
    out = scratch / "artifact"
    for number in workers[:-1]:
        shutil.rmtree(out, ignore_errors=True)
        report = convert(model, out, number, mesh)
        yield [{"cold": False, "workers": number, "mesh": " ".join(mesh), "report": report}]
    for state in states:
        yield list(rounds(model, scratch, workers[-1], mesh, count, state == "cold"))


def summary(rows: list[Row], size: int) -> Row:
    """Medians of one group of rounds."""
    reports = [r["report"] for r in rows]
    seconds = statistics.median(r["seconds"] for r in reports)
    gigabytes = size / 1e9
    out: Row = {
        "cold": rows[0]["cold"],
        "workers": rows[0]["workers"],
        "mesh": rows[0]["mesh"],
        "rounds": len(rows),
        "convert_seconds": seconds,
        "convert_gb_s": gigabytes / seconds,
        "process_seconds": statistics.median(r["process_seconds"] for r in reports),
        "cores_busy": statistics.median(sum(r["core_seconds"].values()) / r["seconds"] for r in reports),
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in reports),
        "core_seconds_per_gb": {
            p: statistics.median(r["core_seconds"].get(p, 0.0) for r in reports) / gigabytes for p in PHASES
        },
    }
    if "cp_seconds" in rows[0]:
        cp = statistics.median(r["cp_seconds"] for r in rows)
        out |= {"cp_seconds": cp, "cp_gb_s": gigabytes / cp, "speed_against_cp": cp / seconds}
        out["with_start_against_cp"] = cp / out["process_seconds"]
    return out


def text(groups: list[Row], facts: Row) -> str:
    head = ["state", "mesh", "workers", "convert GB/s", "cp GB/s", "of cp", "with start", "cores busy", "peak GB"]
    head += [f"{p} s/GB" for p in PHASES]
    rows = [head]
    for g in groups:
        keys = ("cp_gb_s", "speed_against_cp", "with_start_against_cp")
        rows.append(
            [
                "cold" if g["cold"] else "warm",
                g["mesh"],
                str(g["workers"]),
                f"{g['convert_gb_s']:.2f}",
                *(f"{g[k]:.2f}" if k in g else "-" for k in keys),
                f"{g['cores_busy']:.1f}",
                f"{g['peak_memory_bytes'] / 1e9:.2f}",
                *(f"{g['core_seconds_per_gb'][p]:.2f}" for p in PHASES),
            ]
        )
    lines = ["| " + " | ".join(r) + " |" for r in rows]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(
        [
            f"# Convert throughput: {facts['cpu']}, {facts['cores']} cores",
            "",
            f"{facts['date']}, Python {facts['python']}, torch {facts['torch']}, {facts['memory_gb']:.0f} GB memory; "
            f"source and output on {facts['file_system']}. Source: {facts['source_gb']:.2f} GB, {facts['layers']} "
            f"layers of {facts['experts']} experts with embedding, head and vision tower: full-size matrices of random "
            "words.",
            f"Command: `{facts['command']}`. Medians of the rounds; "
            + (
                "every mesh was proven bit for bit before it was timed."
                if facts["proven"]
                else "not proven in this run."
            ),
            "`with start` counts Python's and torch's start too. Phase columns are core seconds per GB of source,",
            "summed over threads; `cores busy` is their sum by the seconds of the run.",
            "",
            *lines,
            "",
        ]
    )


def file_system(path: Path) -> str:
    """Kind of the file system that holds a path."""
    command = ["stat", "--file-system", "--format=%T", str(path)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def machine(model: Path, layers: int, experts: int, proven: bool) -> Row:
    import torch

    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "file_system": file_system(model),
        "layers": layers,
        "experts": experts,
        "proven": proven,
        "command": "python -m convert.bench " + shlex.join(sys.argv[1:]).replace(str(model.parent), "SCRATCH"),
        "source_gb": sum(f.stat().st_size for f in model.glob("*.safetensors")) / 1e9,
    }


@click.command()
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    default=Path("build/bench"),
    help="Needs twice the source's size.",
)
@click.option("--layers", default=2, help="Layers; the first is dense.")
@click.option("--experts", default=384, help="Of every other layer. Fewer let more layers share the same room.")
@click.option("--count", default=3, help="Rounds of each kind.")
@click.option("--workers", default="", help="Comma-separated worker counts; the last one also races cp.")
@click.option(
    "--mesh",
    multiple=True,
    default=("--tp 8", "--tp 8 --ep 8", "--world 8 --tp 1 --ep 8"),
    help="Flags of kiln convert.",
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(["warm", "cold"]),
    default=("warm", "cold"),
    help="Of the source when a run begins: just read, or not in memory.",
)
@click.option("--prove/--no-prove", default=True, help="Prove every mesh bit for bit first.")
@click.option("--result", type=click.Path(path_type=Path), default=None, help="NAME of NAME.json and NAME.md.")
def main(
    scratch: Path,
    layers: int,
    experts: int,
    count: int,
    workers: str,
    mesh: tuple[str, ...],
    states: tuple[str, ...],
    prove: bool,
    result: Path | None,
) -> None:
    """Measure conversion on this machine."""
    model, out = scratch / f"k2.6-{layers}x{experts}", scratch / "artifact"
    if not (model / "model.safetensors.index.json").exists():
        shutil.rmtree(model, ignore_errors=True)
        write_demo(model, replace(k26(layers), experts=experts))
    facts = machine(model, layers, experts, prove)
    size = int(facts["source_gb"] * 1e9)
    counts = [int(w) for w in workers.split(",")] if workers else [facts["cores"]]
    for flags in (m.split() for m in mesh if prove):
        shutil.rmtree(out, ignore_errors=True)
        convert(model, out, counts[-1], flags)
        check(model, out)
    measured = list(groups(model, scratch, counts, mesh[0].split(), count, states))
    summaries = [summary(rows, size) for rows in measured]
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(scratch / "copy", ignore_errors=True)
    shown = text(summaries, facts)
    click.echo(shown)
    result = result or RESULTS / f"convert-{facts['cores']}core"
    result.parent.mkdir(parents=True, exist_ok=True)
    written = {"machine": facts, "groups": summaries, "rounds": [row for rows in measured for row in rows]}
    result.with_suffix(".json").write_text(json.dumps(written, indent=1) + "\n")
    result.with_suffix(".md").write_text(shown)


if __name__ == "__main__":
    main()
