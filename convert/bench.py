"""Convert throughput against `cp` of the same files: `python -m convert.bench`.

A full-geometry checkpoint (layer 0, one or more mixture-of-experts layers, embedding, head, vision tower) is converted
and copied in alternating rounds. Cold: the page cache is dropped before each, and every file is fsynced after, in
both. Warm: the source was just read. A speed is printed only if the artifact proves equal to the source.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from convert.demo.checkpoint import write_demo
from convert.demo.geometry import k26

PHASES = ("read", "check", "repack", "hash", "write", "sync")
Row = dict[str, Any]


def drop_caches() -> bool:
    """Writes back and forgets cached pages; False where that is not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


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
    """One conversion in a process of its own; its report, with wall seconds from outside."""
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
                row["dropped"] = drop_caches()
            if kind == "cp":
                row["cp_seconds"] = copy(model, copied)
            else:
                row["report"] = convert(model, out, workers, mesh)
        yield row


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
        "peak_memory_bytes": max(r["peak_memory_bytes"] for r in reports),
        "core_seconds_per_gb": {
            p: statistics.median(r["core_seconds"].get(p, 0.0) for r in reports) / gigabytes for p in PHASES
        },
    }
    if "cp_seconds" in rows[0]:
        cp = statistics.median(r["cp_seconds"] for r in rows)
        out |= {"cp_seconds": cp, "cp_gb_s": gigabytes / cp, "speed_against_cp": cp / seconds}
    return out


def text(groups: list[Row], facts: Row) -> str:
    head = ["state", "mesh", "workers", "convert GB/s", "cp GB/s", "of cp", "peak GB", *(f"{p} s/GB" for p in PHASES)]
    rows = [head]
    for g in groups:
        cp = [f"{g['cp_gb_s']:.2f}", f"{g['speed_against_cp']:.2f}"] if "cp_gb_s" in g else ["-", "-"]
        rows.append(
            [
                "cold" if g["cold"] else "warm",
                g["mesh"],
                str(g["workers"]),
                f"{g['convert_gb_s']:.2f}",
                *cp,
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
            f"{facts['date']}, Python {facts['python']}, torch {facts['torch']}. Source: {facts['source_gb']:.2f} GB, "
            f"{facts['layers']} full-size layers "
            "with embedding, head and vision tower, random words.",
            f"Command: `{facts['command']}`. Medians of the rounds; "
            + (
                "every mesh was proven bit for bit before it was timed."
                if facts["proven"]
                else "not proven in this run."
            ),
            "Phase columns are core seconds per GB of source, summed over threads.",
            "",
            *lines,
            "",
        ]
    )


def machine(model: Path, layers: int, proven: bool) -> Row:
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
        "layers": layers,
        "proven": proven,
        "command": "python -m convert.bench " + " ".join(sys.argv[1:]),
        "source_gb": sum(f.stat().st_size for f in model.glob("*.safetensors")) / 1e9,
    }


@click.command()
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    default=Path("build/bench"),
    help="Needs three times the source's size.",
)
@click.option("--layers", default=2, help="Full-size layers; the first is dense.")
@click.option("--count", default=3, help="Rounds of each kind.")
@click.option("--workers", default="", help="Comma-separated worker counts; the last one also races cp.")
@click.option(
    "--mesh",
    multiple=True,
    default=("--tp 8", "--tp 8 --ep 8", "--world 8 --tp 1 --ep 8"),
    help="Flags of kiln convert.",
)
@click.option("--cold/--no-cold", default=True, help="Also with the page cache dropped before every run.")
@click.option("--prove/--no-prove", default=True, help="Prove every mesh bit for bit first.")
@click.option("--result", type=click.Path(path_type=Path), default=None, help="Where to write NAME.json and NAME.md.")
def main(
    scratch: Path,
    layers: int,
    count: int,
    workers: str,
    mesh: tuple[str, ...],
    cold: bool,
    prove: bool,
    result: Path | None,
) -> None:
    """Measure conversion on this machine."""
    model, out = scratch / f"k2.6-{layers}", scratch / "artifact"
    if not (model / "model.safetensors.index.json").exists():
        shutil.rmtree(model, ignore_errors=True)
        write_demo(model, k26(layers))
    facts = machine(model, layers, prove)
    size = int(facts["source_gb"] * 1e9)
    counts = [int(w) for w in workers.split(",")] if workers else [facts["cores"]]
    groups: list[Row] = []
    raw: list[Row] = []
    for flags in (m.split() for m in mesh if prove):
        shutil.rmtree(out, ignore_errors=True)
        convert(model, out, counts[-1], flags)
        check(model, out)
    first = mesh[0].split()
    for number in counts[:-1]:
        shutil.rmtree(out, ignore_errors=True)
        rows: list[Row] = [
            {"cold": False, "workers": number, "mesh": mesh[0], "report": convert(model, out, number, first)}
        ]
        groups.append(summary(rows, size))
        raw += rows
    for state in (False, True) if cold else (False,):
        rows = list(rounds(model, scratch, counts[-1], first, count, state))
        groups.append(summary(rows, size))
        raw += rows
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(scratch / "copy", ignore_errors=True)
    shown = text(groups, facts)
    click.echo(shown)
    if result is not None:
        result.parent.mkdir(parents=True, exist_ok=True)
        result.with_suffix(".json").write_text(
            json.dumps({"machine": facts, "groups": groups, "rounds": raw}, indent=1) + "\n"
        )
        result.with_suffix(".md").write_text(shown)


if __name__ == "__main__":
    main()
