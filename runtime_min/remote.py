"""An engine's ranks as processes: rank 0 talks with this process over a pipe, and no rank outlives another's death."""

import multiprocessing as mp
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from runtime_min.about import about
from runtime_min.artifact import Artifact
from runtime_min.core import Core
from runtime_min.launch import Processes, Run
from runtime_min.messages import Close, Command, Event, Stats
from runtime_min.models.decoder import Decoder
from runtime_min.ranks import RanksError
from runtime_min.request import Bounds, Limits

# Seconds between two steps of an idle engine: the other ranks wait for rank 0 no longer than that.
IDLE = 1.0
CLOSING = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What rank 0 says when the engine can take requests."""

    bounds: Bounds
    groups: int
    about: tuple[str, ...]


def serve(model: Decoder, artifact: Artifact, argument: tuple[Limits, Connection]) -> None:
    """The task of every rank: steps until rank 0 is told to close, or the other end of its pipe is gone."""
    limits, pipe = argument
    core = Core.load(model, artifact, limits)
    if model.ranks.rank != 0:
        core.follow()
        return
    pipe.send(Ready(bounds=core.bounds, groups=model.ranks.groups, about=about(core, artifact)))
    while not core.closed:
        commands: list[Command] = []
        try:
            while pipe.poll(0 if core.busy or commands else IDLE):
                commands += pickle.loads(pipe.recv_bytes())
        except EOFError:
            commands.append(Close())
        events = core.step(commands)
        if events:
            pipe.send((events, core.stats))


class Remote:
    """All ranks of an artifact on this machine, each in a process of its own."""

    def __init__(self, run: Run, limits: Limits, world: int) -> None:
        self.limits = limits
        self.pipe, theirs = mp.Pipe()
        self.sender = ThreadPoolExecutor(1)
        self.processes = Processes(run, serve, (limits, theirs), world)
        theirs.close()
        try:
            ready = self._next(None)
        except BaseException:
            self.processes.kill()
            raise
        assert isinstance(ready, Ready)
        self.bounds, self.groups, self.about, self.stats = ready.bounds, ready.groups, ready.about, Stats()

    def step(self, commands: list[Command], seconds: float) -> list[Event]:
        """Sends commands, and gives what has arrived. RanksError once a rank has died; the others are ended then."""
        if commands:
            self._send(commands)
        events: list[Event] = []
        news = self._next(seconds)
        while news is not None:
            events += news[0]
            self.stats = news[1]
            news = self.pipe.recv() if self.pipe.poll() else None
        return events

    def _send(self, commands: list[Command]) -> None:
        """Sends from a thread, since rank 0 may be sending much at the same time. Tensors travel as bytes: by itself a
        connection would put each in shared memory, which is small in many containers."""
        self.sender.submit(self.pipe.send_bytes, pickle.dumps(commands))

    def _next(self, seconds: float | None) -> Any:
        """The next message, or None if none came in time."""
        wait([self.pipe, *self.processes.sentinels], seconds)
        try:
            if self.pipe.poll():
                return self.pipe.recv()
        except (EOFError, ConnectionError):
            wait(self.processes.sentinels, CLOSING)
        if not self.processes.alive():
            raise RanksError("the ranks have ended; start again")
        return None

    def close(self) -> None:
        """Ends the ranks: in order if they answer in time."""
        try:
            self._send([Close()])
            while self.processes.alive() and wait(self.processes.sentinels, CLOSING):
                pass
        except (OSError, RanksError):
            pass
        self.processes.kill()
        self.sender.shutdown()
        self.pipe.close()
