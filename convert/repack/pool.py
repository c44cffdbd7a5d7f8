"""Jobs shared out to processes, each with an engine of its own.

Threads of one process take turns at the interpreter lock between numpy calls, so more than a handful gain nothing;
processes do. Jobs share no file, so the bytes are the same however they are shared out.
"""

import multiprocessing as mp
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Semaphore

import torch

from convert.readers.source import Source
from convert.repack.assemble import Step, steps
from convert.repack.clock import Clock
from convert.repack.engine import Engine, Record, one_thread_per_op
from convert.report import PIECE_BYTES, PIECES, peak_now
from convert.shard.journal import Journal
from convert.shard.plan import Job, Plan
from specs.errors import OutputError

THREADS = 4
LEAST_BYTES = 4 << 30
# What a further process has in memory before it holds any piece.
PROCESS_BYTES = 512 << 20


# Whether the job was ours to do, wall and core seconds by phase, process, and its peak resident bytes.
Outcome = tuple[bool, tuple[Mapping[str, float], Mapping[str, float]], int, int]


@dataclass(slots=True)
class Shared:
    """What every process of a pool sees: bytes read so far, whether to stop, and a permit to begin for each."""

    read: "Synchronized[int]"
    stop: "Synchronized[int]"
    begin: Semaphore


@dataclass(slots=True)
class Context:
    """What a process keeps from job to job."""

    plan: Plan
    source: Source
    journal: Journal
    threads: int
    shared: Shared


class Stopped(Exception):
    """Another process failed; its error is the one to show."""


def processes(jobs: list[Job], total: int, workers: int) -> int:
    """One for every four workers, as far as there are jobs and 4 GiB of source for each."""
    return max(1, min(workers // THREADS, len(jobs), total // LEAST_BYTES))


def run(
    jobs: list[Job],
    total: int,
    plan: Plan,
    source: Source,
    journal: Journal,
    workers: int,
    clock: Clock,
    done: Callable[[Job], None],
    progress: Callable[[int], None],
) -> int:
    """Carries out and records every job that is ours to take, then calls `done`; returns other processes' peak bytes.

    `total` is the number of bytes the jobs read. Raises the first error after all processes have ended.
    """
    count = processes(jobs, total, workers)
    if count == 1:

        def finished(job: Job, record: Record) -> None:
            journal.record(job, record)
            done(job)

        budget = PIECES * PIECE_BYTES * workers
        engine = Engine(journal.out, workers, budget, clock, finished, progress)
        with one_thread_per_op():
            engine.run((job, steps(job, plan, source, clock)) for job in jobs if journal.take(job))
        return 0
    spawn = mp.get_context("spawn")
    shared = Shared(spawn.Value("q", 0), spawn.Value("b", 0), spawn.Semaphore(0))
    context = Context(replace(plan, jobs=()), source, journal, workers // count, shared)
    try:
        with ProcessPoolExecutor(count, spawn, _begin, (context,)) as pool, _following(shared, progress):
            waiting = {pool.submit(_one, job): job for job in jobs}
            # A process that is killed while the pool starts another one leaves that one behind (Python 3.11): none
            # begins before all are there.
            for _ in range(count):
                shared.begin.release()
            return _results(waiting, shared, clock, done)
    except BrokenProcessPool as e:
        raise OutputError(
            f"{journal.out}: a worker process was killed, perhaps for want of memory; use fewer --workers and run the "
            "same command again: it goes on after the last finished part"
        ) from e


def _results(waiting: dict["Future[Outcome]", Job], shared: Shared, clock: Clock, done: Callable[[Job], None]) -> int:
    """The sum of the processes' peaks, or the first error once none of them works any more."""
    peaks: dict[int, int] = {}
    failure: BaseException | None = None
    for future in as_completed(waiting):
        try:
            ours, times, process, peak = future.result()
        except BaseException as e:
            shared.stop.value = 1
            if failure is None or isinstance(failure, Stopped):
                failure = e
            continue
        peaks[process] = peak
        clock.add(times)
        if ours:
            done(waiting[future])
    if failure is not None:
        raise failure
    return sum(peaks.values())


class _following:
    """Hands on to `progress` what all processes have read, twice a second."""

    def __init__(self, shared: Shared, progress: Callable[[int], None]) -> None:
        self.shared, self.progress, self.told = shared, progress, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        while not self._over.wait(0.5):
            self._tell()

    def _tell(self) -> None:
        now = self.shared.read.value
        self.progress(now - self.told)
        self.told = now

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._tell()


_context: Context | None = None


def _begin(context: Context) -> None:
    """A new process: one thread an op, and no life after the parent's."""
    global _context
    _context = context
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    context.shared.begin.acquire()


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _one(job: Job) -> Outcome:
    """One job, in a process of the pool."""
    assert _context is not None
    c, clock = _context, Clock()

    def progress(n: int) -> None:
        with c.shared.read.get_lock():
            c.shared.read.value += n

    budget = PIECES * PIECE_BYTES * c.threads - PROCESS_BYTES
    if ours := c.journal.take(job):
        engine = Engine(c.journal.out, c.threads, budget, clock, c.journal.record, progress)
        engine.run([(job, _until_stopped(steps(job, c.plan, c.source, clock), c.shared))])
    return ours, (dict(clock.wall), dict(clock.core)), os.getpid(), peak_now()


def _until_stopped(every: Iterator[Step], shared: Shared) -> Iterator[Step]:
    for step in every:
        if shared.stop.value:
            raise Stopped
        yield step
