"""convert(plan, source, out): the whole run on one screen."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from convert import provenance
from convert.readers.source import LICENCE_GLOBS, TOKENIZER_FILES, Source
from convert.repack import pool
from convert.repack.assemble import tensors
from convert.repack.clock import Clock
from convert.report import Report, available_memory, disk_problems, peak_memory, peak_now
from convert.shard.journal import FOLDER, Journal
from convert.shard.plan import Job, Plan
from convert.shard.seal import seal
from convert.shard.writer import write_file
from specs import manifest
from specs.errors import ArtifactError, PlanError
from specs.storage import nbytes

log = logging.getLogger(__name__)


Part = tuple[int, int]


def convert(
    plan: Plan,
    source: Source,
    out: Path,
    workers: int,
    progress: Callable[[int], None] = lambda n: None,
    command: str = "",
    part: Part | None = None,
) -> Report:
    """Writes the artifact of `plan` to `out`, or goes on with an unfinished one; the manifest comes last.

    With `part` (i, n) others may work on the same artifact at the same time: this process begins with its share, goes
    on with what nobody has taken, and seals if it finds all finished.
    Raises an InputError for whatever is wrong with source or output. Nothing unfinished then carries a final name,
    and finished parts stay for the next run.
    """
    begin, clock = time.perf_counter(), Clock()
    if (finished := already_there(plan, source, out)) is not None:
        return finished
    journal = Journal(out, f"{plan.digest}\n{source.state}\n", shared=part is not None)
    try:
        # Another part may have sealed while this one waited for the lock.
        if (finished := already_there(plan, source, out)) is not None:
            return finished
        before = {j.number for j in plan.jobs if journal.finished(j) is not None}
        todo = [j for j in ordered(plan.jobs, part) if j.number not in before]
        progress(sum(job_bytes(j) for j in plan.jobs if j.number in before))
        done, others = carry_out(todo, plan, source, journal, workers, clock, progress)
        with journal.sealing(), clock("seal"):
            logical, zero, waiting = last(plan, source, out, journal, command)
    finally:
        journal.close()
    return Report(
        out=out,
        seconds=time.perf_counter() - begin,
        bytes_read=sum(map(job_bytes, done)),
        resumed_jobs=len(before),
        bytes_written=sum(f.size for job in done for f in job.files.values()),
        files=sum(len(j.files) for j in plan.jobs),
        peak_bytes=others + peak_now(),
        wall=dict(clock.wall),
        core=dict(clock.core),
        logical=logical,
        waiting=waiting,
        warnings=(f"{zero} scales are zero; their groups of 32 weights are zero too",) if zero else (),
    )


def carry_out(
    todo: list[Job],
    plan: Plan,
    source: Source,
    journal: Journal,
    workers: int,
    clock: Clock,
    progress: Callable[[int], None],
) -> tuple[list[Job], int]:
    """The jobs that were ours to do, now recorded, and the peak resident bytes of further processes."""
    in_order = sorted(todo, key=lambda job: job.number)
    stage = source.stage({j.number: tensors(j) for j in in_order}, journal.folder / "shards")
    if stage is not None:
        # A shard stays until its last job: the checkpoint's own order holds the fewest.
        todo = in_order
    check_room(todo, journal.out, workers, 0 if stage is None else stage.peak)
    done: list[Job] = []

    def over(job: Job) -> None:
        done.append(job)
        if stage is not None:
            stage.finished(job.number)

    with stage or nullcontext():
        total = sum(map(job_bytes, todo))
        return done, pool.run(todo, total, plan, source, journal, workers, clock, over, progress)


def ordered(jobs: Sequence[Job], part: Part | None) -> list[Job]:
    """Jobs in the order in which one of n processes tries them: its own share, largest first, then the others'."""
    index, n = part or (1, 1)
    deal = sorted(jobs, key=job_bytes, reverse=True)
    return [job for k in range(n) for job in deal[(index - 1 + k) % n :: n]]


def last(plan: Plan, source: Source, out: Path, journal: Journal, command: str) -> tuple[dict[str, str], int, int]:
    """Seals if every job is finished: logical digests, zero scales, and the jobs that others are still to finish."""
    if (out / manifest.NAME).exists():
        journal.remove()
        return dict(manifest.read(out)["logical"]), 0, 0
    records = {j.number: r for j in plan.jobs if (r := journal.finished(j)) is not None}
    zero = sum(r["zero_scales"] for r in records.values())
    if waiting := len(plan.jobs) - len(records):
        return {}, zero, waiting
    journal.sweep()
    write_file(out / provenance.NAME, provenance.provenance(command, source))
    logical = finish(plan, source, out, records, journal)
    journal.remove()
    return logical, zero, 0


def finish(
    plan: Plan, source: Source, out: Path, records: dict[int, dict[str, Any]], journal: Journal
) -> dict[str, str]:
    """Seals. A source that turns out to be damaged takes the finished parts with it: a rerun starts anew."""
    try:
        return seal(plan, source, out, records)
    except ArtifactError:
        journal.forget()
        raise


def already_there(plan: Plan, source: Source, out: Path) -> Report | None:
    """A report if `out` is this very artifact; PlanError if it is occupied by anything else; None if it is free."""
    if not (out / manifest.NAME).exists():
        if not out.exists() or (out / FOLDER).is_dir() or not any(out.iterdir()):
            return None
        raise PlanError(f"{out}: is not empty and not an unfinished conversion; choose another --out or empty it")
    found = manifest.read(out)
    if found["plan"] != plan.digest or provenance.read(out).get("source_state") != source.state:
        raise PlanError(
            f"{out}: holds a finished artifact of another source, mesh or version, or a fetched one; "
            "choose another --out (of a draft: another name) or delete it"
        )
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    return Report(out=out, seconds=0.0, logical=found["logical"], already_there=True)


def job_bytes(job: Job) -> int:
    """Bytes that the steps of a job read from the source."""
    total = 0
    for work in (w for works in job.store.values() for w in works):
        family = work.item.family
        if work.form.stack:
            experts = (work.stop - work.start) * (family.stack // work.form.stack)
            total += experts * sum(n * k // 2 + n * k // 16 + 8 for n, k in family.shapes)
        else:
            total += sum(nbytes(s, family.row.dtype) for s in family.shapes)
    return total


def check_room(jobs: list[Job], out: Path, workers: int, passing: int = 0) -> None:
    """PlanError if memory or disk are short, with what is needed, what is there and what to do.

    passing: bytes of source that pass through the output's disk.
    """
    problems = []
    need, have = peak_memory(workers), available_memory()
    if have < need:
        largest = max((w.nbytes for j in jobs for ws in j.store.values() for w in ws), default=0)
        problems.append(
            f"memory: {workers} workers may need {need / 1e9:.2f} GB, {have / 1e9:.2f} GB are available "
            f"(largest tensor {largest / 1e9:.2f} GB, streamed); use fewer --workers"
        )
    problems += disk_problems(out, sum(f.size for j in jobs for f in j.files.values()) + passing)
    if problems:
        raise PlanError(problems)


def missing_side_files(folder: Path) -> list[str]:
    """Warnings for a source without tokenizer or licence."""
    warnings = []
    if not any((folder / f).is_file() for f in TOKENIZER_FILES):
        warnings.append(f"{folder}: no {' or '.join(TOKENIZER_FILES)}; the artifact runs on token ids only")
    if not any(True for glob in LICENCE_GLOBS for _ in folder.glob(glob)):
        warnings.append(f"{folder}: no LICENSE file; the artifact must not be published without one")
    return warnings
