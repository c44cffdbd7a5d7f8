"""Jobs shared out to processes, each with an engine of its own that takes the next job while its last one drains.

Threads of one process take turns at the interpreter lock between numpy calls, so more than a handful gain nothing;
processes do. Jobs share no file, so the bytes are the same however they are shared out.
"""

import multiprocessing as mp
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from tempfile import NamedTemporaryFile

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


# Wall and core seconds by phase, and peak resident bytes.
Outcome = tuple[tuple[Mapping[str, float], Mapping[str, float]], int]
# How often the parent looks at what its processes have read and finished.
GLANCE_SECONDS = 0.2


@dataclass(slots=True)
class Shared:
    """What every process of a pool sees: bytes read so far, how many jobs were handed out, numbers of those that are
    finished, whether to stop, and a permit to begin for each."""

    read: "Synchronized[int]"
    taken: "Synchronized[int]"
    finished: "SimpleQueue[int]"
    stop: "Synchronized[int]"
    begin: Semaphore


@dataclass(slots=True)
class Context:
    """What a process knows."""

    jobs: list[Job]
    plan: Plan
    source: Source
    journal: Journal
    threads: int


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
    shared = Shared(
        read=spawn.Value("q", 0),
        taken=spawn.Value("q", 0),
        finished=spawn.SimpleQueue(),
        stop=spawn.Value("b", 0),
        begin=spawn.Semaphore(0),
    )
    context = Context(jobs, replace(plan, jobs=()), source, journal, workers // count)
    try:
        with _told(context) as place, ProcessPoolExecutor(count, spawn, _begin, (place, shared)) as pool:
            waiting = [pool.submit(_work) for _ in range(count)]
            # A process that is killed while the pool starts another one leaves that one behind (Python 3.11): none
            # begins before all are there.
            for _ in range(count):
                shared.begin.release()
            try:
                _follow(waiting, jobs, shared, done, progress)
            finally:
                shared.stop.value = 1
            return _results(waiting, clock)
    except BrokenProcessPool as e:
        raise OutputError(
            f"{journal.out}: a worker process was killed, perhaps for want of memory; use fewer --workers and run the "
            "same command again: it goes on after the last finished part"
        ) from e


@contextmanager
def _told(context: Context) -> Iterator[str]:
    """A file with the context, while the pool lives. As an argument, too large for a pipe, it would keep the
    parent from starting the next process until the last one has imported everything."""
    with NamedTemporaryFile(prefix="kiln-") as file:
        pickle.dump(context, file)
        file.flush()
        yield file.name


def _follow(
    waiting: list["Future[Outcome]"],
    jobs: list[Job],
    shared: Shared,
    done: Callable[[Job], None],
    progress: Callable[[int], None],
) -> None:
    """Hands on what all processes have read and finished until they end. The first that fails stops the others."""
    by_number, told, left = {job.number: job for job in jobs}, 0, set(waiting)
    while left:
        over, left = wait(left, GLANCE_SECONDS)
        if any(future.exception() is not None for future in over):
            shared.stop.value = 1
        now = shared.read.value
        progress(now - told)
        told = now
        while not shared.finished.empty():
            done(by_number[shared.finished.get()])


def _results(waiting: list["Future[Outcome]"], clock: Clock) -> int:
    """The sum of the processes' peaks, or the error that stopped them."""
    failures = [e for future in waiting if (e := future.exception()) is not None]
    if failures:
        raise next((e for e in failures if not isinstance(e, Stopped)), failures[0])
    outcomes = [future.result() for future in waiting]
    for times, _ in outcomes:
        clock.add(times)
    return sum(peak for _, peak in outcomes)


_here: tuple[Context, Shared] | None = None


def _begin(place: str, shared: Shared) -> None:
    """A new process: one thread an op, and no life after the parent's."""
    global _here
    _here = pickle.loads(Path(place).read_bytes()), shared
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    shared.begin.acquire()


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work() -> Outcome:
    """A process's whole share, one job after another as they come."""
    assert _here is not None
    (c, shared), clock = _here, Clock()

    def progress(n: int) -> None:
        with shared.read.get_lock():
            shared.read.value += n

    def finished(job: Job, record: Record) -> None:
        c.journal.record(job, record)
        shared.finished.put(job.number)

    budget = PIECES * PIECE_BYTES * c.threads - PROCESS_BYTES
    engine = Engine(c.journal.out, c.threads, budget, clock, finished, progress)
    engine.run((job, _until_stopped(steps(job, c.plan, c.source, clock), shared)) for job in _mine(c, shared))
    return (dict(clock.wall), dict(clock.core)), peak_now()


def _mine(c: Context, shared: Shared) -> Iterator[Job]:
    """Jobs that no other process was handed, and that are ours to do."""
    while True:
        with shared.taken.get_lock():
            number = shared.taken.value
            shared.taken.value += 1
        if number >= len(c.jobs):
            return
        if c.journal.take(c.jobs[number]):
            yield c.jobs[number]


def _until_stopped(every: Iterator[Step], shared: Shared) -> Iterator[Step]:
    for step in every:
        if shared.stop.value:
            raise Stopped
        yield step
