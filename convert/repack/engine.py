"""Runs steps on worker threads and appends their chunks in order; memory in flight never passes the budget.

torch, hashlib and file I/O release the interpreter lock, so threads overlap reading, repacking, hashing and writing.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from convert.repack.assemble import FileKey, Result, Step
from convert.repack.clock import Clock
from convert.shard.plan import Job
from convert.shard.writer import StreamWriter

SEALERS = 4
# Jobs that are not sealed: while one drains, the next is read.
OPEN = 2
Record = dict[str, Any]


@contextmanager
def one_thread_per_op() -> Iterator[None]:
    """Workers are the only parallelism: torch must not start threads of its own inside each of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Budget:
    """Bytes that may be in flight. A step larger than the whole budget is let through alone."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0
        self._changed = threading.Condition()

    def take(self, n: int, wait: bool) -> bool:
        with self._changed:
            while self.used and self.used + n > self.total:
                if not wait:
                    return False
                self._changed.wait()
            self.used += n
            return True

    def give(self, n: int) -> None:
        with self._changed:
            self.used -= n
            self._changed.notify_all()


class Open:
    """A job in progress: its writers, its source digests, and how many files are still to be sealed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.writers: dict[FileKey, StreamWriter] = {}
        self.sources: dict[str, str] = {}
        self.files: dict[str, Record] = {}
        self.zero_scales = 0
        self.aside: list[Future[Result]] = []

    def add(self, result: Result) -> None:
        self.sources.update(result.digests)
        self.zero_scales += result.zero_scales


class Countdown:
    """Calls `then` when it has been called `n` times, from any thread."""

    def __init__(self, n: int, then: Callable[[], None]) -> None:
        self.left, self.then = n, then
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.left -= 1
            last = self.left == 0
        if last:
            self.then()


class Engine:
    """Steps in, files out. `run` returns when every job is sealed, or raises the first error after cleaning up.

    Steppers read and repack; each file belongs to two lanes, one writes and hashes it, the other hashes its tensors;
    sealers fsync and rename.
    """

    def __init__(
        self,
        root: Path,
        workers: int,
        budget: int,
        clock: Clock,
        done: Callable[[Job, Record], None],
        progress: Callable[[int], None],
    ) -> None:
        self.root, self.clock, self.done, self.progress = root, clock, done, progress
        self.budget = Budget(budget)
        self.steppers = ThreadPoolExecutor(workers, "step")
        self.lanes = [ThreadPoolExecutor(1, f"lane-{i}") for i in range(2 * workers)]
        self.sealers = ThreadPoolExecutor(SEALERS, "seal")
        self.pending: deque[tuple[Future[Result], Step, Open] | Open] = deque()
        self.open: list[Open] = []
        self._sealed = threading.Condition()
        self.failure: BaseException | None = None

    def run(self, jobs: Iterable[tuple[Job, Iterable[Step]]]) -> None:
        try:
            for job, steps in jobs:
                self.open.append(state := Open(job))
                for step in steps:
                    self._make_room(step)
                    self._submit(step, state)
                self.pending.append(state)
                self._await_sealed()
            while self.pending:
                self._collect()
        except BaseException as e:
            self.failure = self.failure or e
        waiting = [item[0] for item in self.pending if not isinstance(item, Open)]
        for future in waiting + [f for state in list(self.open) for f in state.aside]:
            future.cancel()
        self.steppers.shutdown()
        for lane in self.lanes:
            lane.shutdown()
        self.sealers.shutdown()
        if self.failure is not None:
            for state in self.open:
                for writer in state.writers.values():
                    writer.discard()
            raise self.failure

    def _submit(self, step: Step, state: Open) -> None:
        future = self.steppers.submit(step.run)
        if step.aside:
            future.add_done_callback(lambda _: self.budget.give(step.nbytes))
            state.aside.append(future)
        else:
            self.pending.append((future, step, state))

    def _await_sealed(self) -> None:
        """Returns when another job may be begun; hands finished steps on meanwhile."""
        while len(self.open) >= OPEN and self.failure is None:
            if self.pending:
                self._collect()
            else:
                with self._sealed:
                    self._sealed.wait(0.1)

    def _make_room(self, step: Step) -> None:
        """Waits until the step's memory fits the budget, handing finished steps on meanwhile."""
        while not self.budget.take(step.nbytes, wait=not self.pending):
            self._collect()
        while self.pending and (isinstance(self.pending[0], Open) or self.pending[0][0].done()):
            self._collect()

    def _collect(self) -> None:
        """The oldest step's chunks to their lanes, or the end of a job to all of them."""
        if self.failure is not None:
            raise self.failure
        item = self.pending.popleft()
        if isinstance(item, Open):
            for digests in item.aside:
                item.add(digests.result())
            barrier = Countdown(len(self.lanes), partial(self._seal_all, item))
            for lane in self.lanes:
                lane.submit(self._guard, barrier)
            return
        future, step, state = item
        result = future.result()
        state.add(result)
        tasks = []
        for key, chunk in result.chunks:
            # Writing and the tensor's digest go on side by side; each keeps its own order.
            for method, shift in ((StreamWriter.write, 0), (StreamWriter.digest, 1)):
                tasks.append((self._lane(key, shift), partial(method, self._writer(state, key), chunk)))
        if not tasks:
            self._over(step, result.read)
        over = Countdown(len(tasks), partial(self._over, step, result.read))
        for number, task in tasks:
            self.lanes[number].submit(self._guard, task, over)

    def _over(self, step: Step, read: int) -> None:
        self.budget.give(step.nbytes)
        self.progress(read)

    def _lane(self, key: FileKey, shift: int) -> int:
        return (2 * (key[1] + (key[0] != "rank")) + shift) % len(self.lanes)

    def _writer(self, state: Open, key: FileKey) -> StreamWriter:
        if key not in state.writers:
            state.writers[key] = StreamWriter(self.root, state.job.files[key], self.clock)
        return state.writers[key]

    def _seal_all(self, state: Open) -> None:
        """Every lane has passed this job: its files are complete and may get their names."""
        writers = list(state.writers.values())
        finish = Countdown(len(writers), partial(self._finish, state))
        for writer in writers:
            self.sealers.submit(self._guard, partial(self._seal, state, writer, finish))

    def _seal(self, state: Open, writer: StreamWriter, finish: Countdown) -> None:
        state.files[writer.plan.path] = writer.seal()
        finish()

    def _finish(self, state: Open) -> None:
        self.done(state.job, {"files": state.files, "sources": state.sources, "zero_scales": state.zero_scales})
        with self._sealed:
            self.open.remove(state)
            self._sealed.notify_all()

    def _guard(self, task: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
        """After a failure tasks do nothing but give their memory back."""
        try:
            if self.failure is None:
                task()
        except BaseException as e:
            self.failure = self.failure or e
        finally:
            after()
