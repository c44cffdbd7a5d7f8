"""A phase of training: how many steps fit its time, its state on disk, and the loop itself."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from convert.demo.geometry import Geometry, config
from convert.demo.training.data import Mix
from convert.demo.training.model import Facts
from convert.demo.training.muon import Optimizer, rate_factor
from convert.demo.training.params import Params, Row
from convert.demo.training.rope import Rope

log = logging.getLogger(__name__)
# Steps between which a step is timed, to learn how many fit the time.
TIMED = (15, 45)
SPARE = 0.97
LOGGED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a run is given. steps 0: as many as `seconds` allow, decided once and logged."""

    geometry: Geometry
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    mix: Mix = field(default_factory=Mix)
    factor: float | None = 1.5
    bias_rate: float = 1e-3
    warm: int = 100
    state: Path | None = None
    saved_every: float = 40.0

    def facts(self) -> Facts:
        text = config(self.geometry)["text_config"]
        return Facts(
            geometry=self.geometry,
            rope=Rope.of(text),
            norm_eps=text["rms_norm_eps"],
            routed_scale=text["routed_scaling_factor"],
        )


@dataclass(slots=True)
class Clock:
    """How many steps a phase has, decided once: `steps` if given, else from the time that the TIMED steps took."""

    seconds: float
    steps: int
    device: torch.device
    spent: float = 0.0
    began: float = field(default_factory=time.monotonic)
    timed: float = 0.0

    @property
    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.began

    def tick(self, step: int) -> None:
        """Called before each step."""
        if self.steps or step not in TIMED:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if step == TIMED[0]:
            self.timed = self.elapsed
            return
        each = (self.elapsed - self.timed) / (TIMED[1] - TIMED[0])
        self.steps = step + max(1, int((self.seconds - self.elapsed) * SPARE / each))
        log.info("%.1f ms a step: %d steps", 1000 * each, self.steps)

    def factor(self, step: int, warm: int) -> float:
        """Share of the peak rate; the steps before the number is known belong to the rise and the flat part."""
        return rate_factor(step, self.steps or 10**9, warm)

    def over(self, step: int) -> bool:
        return bool(self.steps) and step >= self.steps


@dataclass(slots=True)
class Phase:
    """Weights in training with everything that a resumed run needs."""

    name: str
    params: dict[str, Params]
    optimizers: dict[str, Optimizer]
    biases: Tensor
    clock: Clock
    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    saved: float = field(default_factory=time.monotonic)

    def save(self, path: Path) -> None:
        """Writes the state under a temporary name and renames it."""
        part = path.with_name(f"{path.name}.{self.name}.part")
        torch.save(
            {
                "params": {k: {n: t.detach() for n, t in p.items()} for k, p in self.params.items()},
                "optimizers": {k: o.state() for k, o in self.optimizers.items()},
                "biases": self.biases,
                "step": self.step,
                "steps": self.clock.steps,
                "spent": self.clock.elapsed,
                "curve": self.curve,
            },
            part,
        )
        part.replace(self.file(path))
        self.saved = time.monotonic()

    def file(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.{self.name}")

    def resume(self, path: Path) -> None:
        """Goes on from a saved state, if there is one."""
        if not self.file(path).exists():
            return
        found = torch.load(self.file(path), map_location=self.biases.device)
        with torch.no_grad():
            for key, group in found["params"].items():
                for name, tensor in group.items():
                    self.params[key][name].copy_(tensor)
            self.biases.copy_(found["biases"])
        for key, state in found["optimizers"].items():
            self.optimizers[key].load(state)
        self.step, self.curve = found["step"], found["curve"]
        self.clock.steps, self.clock.spent = found["steps"], found["spent"]
        log.info("%s: goes on at step %d of %d", self.name, self.step, self.clock.steps)


def muon_names(rows: list[Row]) -> frozenset[str]:
    """Matrices inside the text model and the drafts; embedding, head, router and the tower are AdamW's."""
    others = ("embed", "head", "router", "vit.")
    return frozenset(r.name for r in rows if len(r.shape) - r.leading == 2 and not r.name.startswith(others))


def run(phase: Phase, setup: Setup, work: Callable[[int, float], Mapping[str, Tensor]]) -> None:
    """Steps until the clock's number is reached. work(step, factor) trains one step and gives its figures."""
    if setup.state:
        phase.resume(setup.state)
    while not phase.clock.over(phase.step):
        phase.clock.tick(phase.step)
        factor = phase.clock.factor(phase.step, setup.warm)
        figures = work(phase.step, factor)
        if phase.step % LOGGED == 0 or phase.step + 1 == phase.clock.steps:
            line = {k: round(float(v), 5) for k, v in figures.items()}
            phase.curve.append({"step": phase.step, "seconds": round(phase.clock.elapsed, 2), "rate": factor, **line})
            log.info("%s %s", phase.name, phase.curve[-1])
        phase.step += 1
        if setup.state and time.monotonic() - phase.saved > setup.saved_every:
            phase.save(setup.state)
    if setup.state:
        phase.save(setup.state)
