"""Times every candidate of every problem of a model on this GPU, and keeps the fastest. Never imported while serving.

Each case that is done is one line of a journal beside the table, with all its timings; a run that is stopped goes on
from there, and the table is made of the journal and of what it said before about anything else.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from runtime_min.kernels import index, tuning
from runtime_min.kernels.cases import Case, cases, rotated, steps, vision_cases
from runtime_min.kernels.choose import chooser
from runtime_min.kernels.cubin import arch_here
from runtime_min.kernels.index import KernelError
from runtime_min.kernels.race import BOUND, Race, Time, fresh, wanted
from runtime_min.kernels.tuning import Entry, Setting
from specs.dims import TextDims, VisionDims
from specs.mesh import Mesh

# A config replaces the default only if it wins this many races against it, one after the other.
FINALS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is tuned, and where it goes. minutes: when to stop, 0 is never. weights: digest of its artifact."""

    dims: TextDims
    vision: VisionDims | None
    mesh: Mesh
    out: Path
    ops: tuple[str, ...] = ()
    minutes: float = 0.0
    weights: str = ""


def setting_here() -> Setting:
    """This GPU and the installed Triton."""
    return Setting(device=torch.cuda.get_device_name(), arch=arch_here(), triton=metadata.version("triton"))


def journal(out: Path) -> Path:
    return out.with_name(f"{out.stem}.timings.jsonl")


def tune(wish: Tuning, progress: Callable[[int, int, str], None]) -> tuple[int, int]:
    """(cases in the table, cases left undone for lack of time). Writes the table after every case."""
    begin = time.monotonic()
    setting = setting_here()
    device = torch.device("cuda")
    found = cases(wish.dims, wish.mesh, list(steps()), device)
    found += vision_cases(wish.vision, device) if wish.vision is not None else []
    chosen = [c for c in found if (not wish.ops or c.problem.op in wish.ops) and len(configs(c)) > 1]
    done = recalled(journal(wish.out), setting)
    left = [c for c in chosen if c.problem not in done]
    table = standing(wish.out, wish.weights, setting) | done
    wish.out.parent.mkdir(parents=True, exist_ok=True)
    with Race(setting.arch, chooser(setting.arch), len(os.sched_getaffinity(0))) as race:
        for case in left:
            race.ahead(v for config in configs(case) for v in race.variants(case, config))
        for number, case in enumerate(left):
            if wish.minutes and time.monotonic() - begin > 60 * wish.minutes:
                return len(table), len(left) - number
            progress(number, len(left), f"{case.problem.op} {tuple(asdict(case.problem).values())}")
            entry, rows = raced(race, case)
            _append(journal(wish.out), setting, entry, rows)
            table[case.problem] = entry
            tuning.write(wish.out, tuning.sealed(setting, table.values(), wish.weights))
    if not left:
        tuning.write(wish.out, tuning.sealed(setting, table.values(), wish.weights))
    return len(table), 0


def standing(path: Path, weights: str, setting: Setting) -> dict[Any, Entry]:
    """What a table says already, if it was timed in this setting, with the device code of today."""
    if not path.exists():
        return {}
    table = tuning.read(path, weights)
    return {e.problem: e for e in table.entries} if table.setting == setting else {}


def configs(case: Case) -> list[Any]:
    """The default, then every other candidate."""
    return list(dict.fromkeys([case.problem.default(), *case.problem.candidates()]))


def raced(race: Race, case: Case) -> tuple[Entry, list[dict[str, Any]]]:
    """The fastest config that gives what the definition gives, and what became of every candidate."""
    want, inputs = wanted(case), rotated(fresh(case))
    default, *others = configs(case)
    error = race.error(case, default, want)
    if not error <= BOUND:
        raise KernelError(f"{case.problem}: the default config differs from its definition by {error:.2g}")
    times = {default: race.time(case, default, inputs)}
    rows = [_row(default, times[default])]
    for config in others:
        reason = _refused(race, case, config, want)
        if reason:
            rows.append({"config": asdict(config), "refused": reason})
            continue
        times[config] = race.time(case, config, inputs)
        rows.append(_row(config, times[config]))
    best = min(times, key=lambda c: times[c].us)
    while best != default and not _wins(race, case, best, default, inputs, times):
        del times[best]
        best = min(times, key=lambda c: times[c].us)
    fastest = times[best]
    entry = Entry(
        problem=case.problem, config=best, us=round(fastest.us, 2), spread=round(fastest.spread, 3),
        default_us=round(times[default].us, 2), tried=len(rows),
    )  # fmt: skip
    return entry, rows


def _wins(
    race: Race, case: Case, best: Any, default: Any, inputs: list[tuple[Any, ...]], times: dict[Any, Time]
) -> bool:
    """Is `best` faster every time? Leaves the last round's times of both."""
    for _ in range(FINALS):
        times[default], times[best] = race.time(case, default, inputs), race.time(case, best, inputs)
        if times[best].us >= times[default].us:
            return False
    return True


def _refused(race: Race, case: Case, config: Any, want: Any) -> str:
    """Why a config is not timed; empty if it may be."""
    try:
        if not race.fits(case, config):
            return "wants more shared memory than a block has"
    except Exception as e:
        # Whatever the compiler says about a candidate is kept with the timings; the default has no such excuse.
        return f"does not compile: {type(e).__name__}: {str(e)[:200]}"
    error = race.error(case, config, want)
    return "" if error <= BOUND else f"differs from the definition by {error:.2g}"


def _row(config: Any, found: Time) -> dict[str, Any]:
    return {"config": asdict(config), "us": round(found.us, 3), "spread": round(found.spread, 3)}


def recalled(path: Path, setting: Setting) -> dict[Any, Entry]:
    """Entries of a journal that were timed in this setting with the device code and fields of today."""
    out: dict[Any, Entry] = {}
    for line in _lines(path):
        if line["setting"] != asdict(setting) or not index.same_source(line["op"], line["source"]):
            continue
        try:
            entry = tuning.entry(line["op"], line)
        except ValueError:
            continue
        out[entry.problem] = entry
    return out


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            # The line that was being written when a run was killed.
            continue


def _append(path: Path, setting: Setting, entry: Entry, rows: Sequence[dict[str, Any]]) -> None:
    op = entry.problem.op
    kept = {
        "op": op, "source": index.source_digest(op), "setting": asdict(setting), **asdict(entry), "timings": rows,
    }  # fmt: skip
    with path.open("ab+") as f:
        # A run that was killed may have left half a line.
        torn = f.seek(0, os.SEEK_END) and f.seek(-1, os.SEEK_END) >= 0 and f.read(1) != b"\n"
        f.write((b"\n" if torn else b"") + json.dumps(kept).encode() + b"\n")
