"""The target's phase: next-token loss on text, conversations and pictures, experts quantized as they will be stored."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from convert.demo.training import params as weights
from convert.demo.training.data import Batch, Dataset
from convert.demo.training.loop import Clock, Phase, Setup, muon_names, run
from convert.demo.training.model import Pictures, forward, logits
from convert.demo.training.muon import Optimizer
from convert.demo.training.params import Params
from convert.demo.training.tower import tower


def target_phase(setup: Setup, seconds: float, steps: int) -> Phase:
    """The target at its beginning."""
    rows = weights.rows(setup.geometry)
    params = weights.begin(rows, setup.seed, setup.device)
    sparse = setup.geometry.layers - setup.geometry.dense_layers
    biases = torch.zeros(sparse, setup.geometry.experts, device=setup.device)
    optimizer = Optimizer(params, muon_names(rows))
    return Phase("target", {"target": params}, {"target": optimizer}, biases, Clock(seconds, steps, setup.device))


def pictured(setup: Setup, w: Params, batch: Batch) -> Pictures | None:
    if not len(batch.pads):
        return None
    return Pictures(batch.pads, tower(setup.geometry, w, batch.patches).flatten(0, 1))


def train_target(setup: Setup, data: Dataset, phase: Phase) -> None:
    facts, params, optimizer = setup.facts(), phase.params["target"], phase.optimizers["target"]

    def work(step: int, factor: float) -> dict[str, Tensor]:
        batch = data.batch(setup.mix, setup.seed, step)
        w = weights.used(params, setup.dtype)
        out = forward(facts, w, phase.biases, batch.inputs, pictures=pictured(setup, w, batch), factor=setup.factor)
        loss = cross_entropy(logits(w, out.hidden).flatten(0, 1), batch.targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(factor)
        loads = out.loads.float()
        phase.biases += setup.bias_rate * factor * (loads.mean(1, keepdim=True) - loads).sign()
        return {"loss": loss.detach(), "lost": out.lost, "peak": (loads.amax(1) / loads.mean(1)).max()}

    run(phase, setup, work)
