"""The drafts' phase: EAGLE3 unrolled over several steps and DFlash over blocks, against the frozen target's choices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from convert.demo.training import drafts as drafting
from convert.demo.training import params as weights
from convert.demo.training.data import Dataset, Mix
from convert.demo.training.dflash import anchors, blocks
from convert.demo.training.drafts import BLOCK, Draft
from convert.demo.training.eagle import Unroll
from convert.demo.training.loop import Clock, Phase, Setup, muon_names, run
from convert.demo.training.model import Facts, forward, logits
from convert.demo.training.muon import Optimizer
from convert.demo.training.params import Params
from convert.demo.training.tokens import IDS, MASK

UNROLL = 4
STEP_WEIGHT = 0.8
BLOCK_DECAY = 4.0
CHATTER = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<think>", "</think>")


def frequent(data: Dataset, mix: Mix, count: int, vocab: int) -> Tensor:
    """The `count` ids that training sees most, rising; those that hold a conversation together are among them."""
    seen = torch.zeros(vocab, dtype=torch.float64)
    spans = {**data.spans, "chats": (max(high for _, high in data.spans.values()), len(data.stream))}
    for kind, (low, high) in spans.items():
        found = torch.bincount(data.stream[low:high].long(), minlength=vocab).cpu()
        seen += found * (getattr(mix, kind) / (high - low))
    seen[[IDS[name] for name in CHATTER]] = torch.inf
    return seen.topk(count).indices.sort().values


def draft_phase(setup: Setup, made: Mapping[str, Draft], seconds: float, steps: int, biases: Tensor) -> Phase:
    """All drafts at their beginning; they train side by side on the same batches."""
    params, optimizers = {}, {}
    for i, (name, draft) in enumerate(made.items()):
        rows = drafting.rows(draft)
        params[name] = weights.begin(rows, setup.seed + 1 + i, setup.device)
        optimizers[name] = Optimizer(params[name], muon_names(rows))
    return Phase("drafts", params, optimizers, biases, Clock(seconds, steps, setup.device))


def agreement(proposed: Tensor, wanted: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """(cross-entropy against the target's distribution, share of equal first choices).

    proposed [..., draft vocabulary], wanted [..., vocabulary]: logits. own: the target's ids of the draft's.
    """
    best = wanted.argmax(-1)
    if own is not None:
        wanted = wanted[..., own]
    loss = (proposed.logsumexp(-1) - (wanted.softmax(-1) * proposed).sum(-1)).mean()
    first = proposed.detach().argmax(-1)
    return loss, ((first if own is None else own[first]) == best).float().mean()


def eagle_loss(draft: Draft, w: Params, seen: "Seen", own: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted loss over UNROLL steps, and the agreement of each."""
    rows = seen.states.shape[1] - UNROLL
    unroll = Unroll(draft, w, seen.states[:, :rows])
    total, figures = torch.zeros((), device=seen.states.device), {}
    for j in range(UNROLL):
        out = unroll.step(seen.embeds[:, 1 + j : 1 + j + rows])
        proposed = linear(out, w.get("head", seen.head)).float()
        loss, equal = agreement(proposed, seen.logits[:, 1 + j : 1 + j + rows], own)
        total = total + STEP_WEIGHT**j * loss
        figures[f"{draft.kind}.{j + 1}"] = equal
    return total, figures


def dflash_loss(draft: Draft, w: Params, seen: "Seen", step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted loss over the rows of all blocks, and the agreement of each row."""
    device, (b, length, _) = seen.states.device, seen.states.shape
    starts = anchors(1 + step % BLOCK, length, device)
    masks = seen.mask.expand(b, len(starts), BLOCK - 1, -1)
    embeds = torch.cat([seen.embeds[:, starts, None], masks], 2).flatten(1, 2)
    out = blocks(draft, w, seen.states, embeds, starts).view(b, len(starts), BLOCK, -1)
    total, figures = torch.zeros((), device=device), {}
    for i in range(1, BLOCK):
        loss, equal = agreement(linear(out[:, :, i], seen.head).float(), seen.logits[:, starts + i - 1], None)
        total = total + math.exp(-(i - 1) / BLOCK_DECAY) * loss
        figures[f"dflash.{i}"] = equal
    return total, figures


@dataclass(frozen=True, slots=True)
class Seen:
    """What drafts may know of a batch: states [B, S, taps * hidden], the target's logits [B, S, V], embeddings."""

    states: Tensor
    logits: Tensor
    embeds: Tensor
    mask: Tensor
    head: Tensor


@torch.no_grad()
def seen_by(setup: Setup, facts: Facts, w: Params, biases: Tensor, ids: Tensor) -> Seen:
    """The frozen target on ids [B, S + 1] without pictures."""
    out = forward(facts, w, biases, ids[:, :-1], taps=drafting.TAPS, factor=setup.factor)
    states = torch.cat(out.taps, -1).to(setup.dtype)
    return Seen(states, logits(w, out.hidden), w["embed"][ids], w["embed"][MASK], w["head"])


def train_drafts(
    setup: Setup, data: Dataset, target: Params, made: Mapping[str, Draft], phase: Phase, own: Tensor
) -> None:
    """own: the target's ids of the draft vocabulary of whoever has a head of its own."""
    facts = setup.facts()
    frozen = {n: t.detach() for n, t in weights.used(target, setup.dtype).items()}

    def work(step: int, factor: float) -> dict[str, Tensor]:
        seen = seen_by(setup, facts, frozen, phase.biases, data.batch(setup.mix, setup.seed + 1, step).ids)
        figures: dict[str, Tensor] = {}
        for name, draft in made.items():
            w = {n: t.to(torch.bfloat16).to(setup.dtype) for n, t in phase.params[name].items()}
            if draft.kind == "dflash":
                loss, found = dflash_loss(draft, w, seen, step)
            else:
                loss, found = eagle_loss(draft, w, seen, own if "head" in w else None)
            loss.backward()  # type: ignore[no-untyped-call]
            phase.optimizers[name].step(factor)
            figures |= {f"{name}.loss": loss.detach(), **found}
        return figures

    run(phase, setup, work)
