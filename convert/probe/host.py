"""This machine: packages, memory, disk, and how long reading and writing will take."""

import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from convert.probe.line import Line
from convert.probe.speed import Speed
from convert.report import SLACK_DISK, available_memory, peak_memory
from convert.tables import size
from specs.packages import KNOWN_GOOD, LINUX_ONLY

# Processor time of a conversion per GB of source, read to sync: benchmarks/results/convert-16core.md.
CORE_SECONDS_PER_GB = 4.7


def packages_line(ranges: Mapping[str, tuple[str, str]] = KNOWN_GOOD) -> Line:
    """Installed versions against the known good ones."""
    installed = {name: installed_version(name) for name in ranges}
    problems = list(_version_problems(installed, ranges))
    missing = [n for n, v in installed.items() if v is None and not (n in LINUX_ONLY and platform.system() != "Linux")]
    facts = {"packages": installed}
    if missing:
        found = f"not installed: {', '.join(missing)}"
        return Line(name="packages", verdict="no-go", found=found, do=f"pip install {' '.join(missing)}", facts=facts)
    if problems:
        do = "; ".join(do for _, do in problems)
        return Line(name="packages", verdict="warn", found="; ".join(f for f, _ in problems), do=do, facts=facts)
    found = ", ".join(f"{n} {v}" for n, v in installed.items() if v)
    return Line(name="packages", verdict="go", found=f"known good: {found}", facts=facts)


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, int] | None:
    """(major, minor) of a version, or None if it does not begin with them."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return None if match is None else (int(match[1]), int(match[2]))


def _version_problems(
    installed: Mapping[str, str | None], ranges: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    for name, text in installed.items():
        first, last = ranges[name]
        if text is None:
            continue
        found, low, high = release(text), release(first), release(last)
        assert low is not None and high is not None
        if found is None:
            yield f"{name} {text}: no version number that can be compared", f"install {name} {first} to {last}"
        elif found < low:
            yield f"{name} {text} is older than {first}", f"pip install '{name}>={first}'"
        elif found > high:
            yield f"{name} {text} is newer than the tested {last}", f"if anything fails, pip install '{name}=={last}.*'"


def memory_line(workers: int) -> Line:
    """What a conversion may take of the host's memory."""
    need, have = peak_memory(workers), available_memory()
    facts = {"needed_bytes": need, "available_bytes": have, "workers": workers}
    found = f"at most {size(need)} with {workers} workers, {size(have)} available"
    if need <= have:
        return Line(name="host memory", verdict="go", found=found, facts=facts)
    fewer = next((w for w in range(workers - 1, 0, -1) if peak_memory(w) <= have), None)
    do = f"use --workers {fewer}" if fewer else f"free {size(peak_memory(1) - have)}"
    return Line(name="host memory", verdict="no-go", found=found, do=do, facts=facts)


def existing(path: Path) -> Path:
    """The folder itself or its nearest parent that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def disk_line(out: Path, artifact: int, cache: Path | None, download: int) -> Line:
    """Room for the artifact, and for what still has to be downloaded; on one disk both together."""
    wanted: dict[int, tuple[Path, int]] = {}
    needs = [(out, artifact + SLACK_DISK)] + ([(cache, download)] if cache is not None and download else [])
    for path, need in needs:
        disk = existing(path)
        first, sum_so_far = wanted.get(os.stat(disk).st_dev, (disk, 0))
        wanted[os.stat(disk).st_dev] = (first, sum_so_far + need)
    found, do = [f"artifact {size(artifact)} to {out}"], []
    if download:
        found.append(f"download {size(download)} to {cache}")
    facts = {"artifact_bytes": artifact, "download_bytes": download, "disks": []}
    for disk, need in wanted.values():
        free = shutil.disk_usage(disk).free
        found.append(f"{size(free)} free at {disk}")
        facts["disks"].append({"path": str(disk), "needed_bytes": need, "free_bytes": free})  # type: ignore[attr-defined]
        if free < need:
            do.append(f"free {size(need - free)} at {disk}, or choose another disk by --out")
    return Line(name="disk", verdict="no-go" if do else "go", found="; ".join(found), do="; ".join(do), facts=facts)


def convert_seconds(read: int, written: int, speed: Speed, workers: int) -> float:
    """The slower of the disk, writing as fast as it reads, and the processors."""
    cores = min(workers, os.cpu_count() or 1)
    return max((read + written) / speed.bytes_per_second, read / 1e9 * CORE_SECONDS_PER_GB / cores)


def span(seconds: float) -> str:
    """Seconds as people say them."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def time_line(read: int, written: int, download: int, speed: Speed, workers: int) -> Line:
    """Estimated seconds to convert and to load, at the disk's speed."""
    convert, load = convert_seconds(read, written, speed, workers), written / speed.bytes_per_second
    first = f" after a download of {size(download)}" if download else ""
    return Line(
        name="time",
        verdict="go",
        found=f"about {span(convert)} to convert{first}, {span(load)} to load; {speed.how}",
        facts={
            "convert_seconds": round(convert, 1),
            "load_seconds": round(load, 1),
            "disk_bytes_per_second": round(speed.bytes_per_second),
            "disk_measured": speed.measured,
            "core_seconds_per_gb": CORE_SECONDS_PER_GB,
        },
    )
