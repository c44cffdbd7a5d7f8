"""Trains the small model that ships with this package, and its drafts: python -m convert.demo.train --out FOLDER

Writes FOLDER/target (a checkpoint in the release's format), FOLDER/NAME for each draft, FOLDER/log.json and
FOLDER/heldout.json. A number of steps that fits the given seconds is decided once and logged; with --steps and
--draft-steps from a log the same batches, rates and seeds are used again.
"""

import argparse
import json
import logging
import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from convert.demo.geometry import TRAINED, config
from convert.demo.training import drafts as drafting
from convert.demo.training import measure, speculate, target
from convert.demo.training import params as weights
from convert.demo.training.corpus import PACKAGES, Corpus, Document, gather
from convert.demo.training.data import Amounts, Dataset, Mix, dataset
from convert.demo.training.export import write_draft, write_target
from convert.demo.training.loop import Phase, Setup
from convert.demo.training.measure import PROMPTS
from convert.demo.training.pictures import Digit, digits
from convert.demo.training.tokens import STOP, encoding

log = logging.getLogger(__name__)
HELD_OUT_CHARS = {"python": 36_000, "packages": 24_000, "code": 12_000}
DOCUMENT_CHARS = 3000
DRAFT_MIX = Mix(python=4, packages=1, code=1, chats=10, pictures=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. steps, draft_steps 0: as many as fit the seconds."""

    out: Path
    setup: Setup
    draft_mix: Mix
    length: int = 1024
    seconds: float = 130.0
    draft_seconds: float = 60.0
    steps: int = 0
    draft_steps: int = 0
    workers: int = 1
    amounts: Amounts = field(default_factory=Amounts)


def held_out(corpus: Corpus) -> list[Document]:
    """The text that is measured: the beginnings of held-out documents of each kind, a fixed number of characters."""
    found: list[Document] = []
    for kind, room in HELD_OUT_CHARS.items():
        for document in sorted((d for d in corpus.documents if d.kind == kind and d.held_out), key=lambda d: d.name):
            text = document.text[: min(DOCUMENT_CHARS, room)]
            if len(text) > 200:
                found.append(replace(document, text=text))
                room -= len(text)
    return found


def train(job: Job, corpus: Corpus, known: list[Digit], command: str = "") -> dict[str, Any]:
    """Both phases and all files; returns the log."""
    began = time.monotonic()
    setup = job.setup
    data = dataset(corpus, known, job.amounts, job.length, setup.seed, job.workers)
    data.stream, data.patches = data.stream.to(setup.device), data.patches.to(setup.device)
    log.info("data: %.1f s, %d ids", time.monotonic() - began, len(data.stream))
    facts: dict[str, Any] = {"command": command, "versions": versions(corpus), "seed": setup.seed} | amounts(
        corpus, data
    )
    main = target.target_phase(setup, job.seconds, job.steps)
    target.train_target(setup, data, main)
    params = main.params["target"]
    write_target(job.out / "target", setup.geometry, weights.stored(params, main.biases, setup.geometry))
    text = held_out(corpus)
    shown = [d for d in known if d.held_out]
    write_held_out(job.out, text, shown)
    with torch.no_grad():
        frozen = weights.used(params, setup.dtype)
    answers = {ask: measure.greedy(setup.facts(), frozen, main.biases, measure.prompt_ids(ask)) for ask in PROMPTS}
    facts |= {"target": record(main), "measured": measured(job, frozen, main, text, shown), "answers": told(answers)}
    write_log(job.out, facts)
    facts |= train_drafts(job, data, main, answers)
    facts["seconds"] = round(time.monotonic() - began, 1)
    write_log(job.out, facts)
    return facts


def train_drafts(job: Job, data: Dataset, main: Phase, answers: dict[str, list[int]]) -> dict[str, Any]:
    setup = replace(job.setup, mix=job.draft_mix)
    made = drafting.drafts(setup.geometry, config(setup.geometry)["text_config"])
    own = speculate.frequent(data, job.setup.mix, drafting.OWN_VOCAB, setup.geometry.vocab).to(setup.device)
    phase = speculate.draft_phase(setup, made, job.draft_seconds, job.draft_steps, main.biases)
    params = main.params["target"]
    speculate.train_drafts(setup, data, params, made, phase, own)
    for name, draft in made.items():
        write_draft(job.out / name, draft.config, drafting.stored(draft, phase.params[name], own))
    with torch.no_grad():
        frozen = weights.used(params, setup.dtype)
    lengths = measure.accept_lengths(setup, frozen, main.biases, made, phase.params, own, answers)
    log.info("tokens a round: %s", lengths)
    return {"drafts": record(phase), "tokens_a_round": lengths}


def measured(job: Job, w: weights.Params, main: Phase, text: list[Document], shown: list[Digit]) -> dict[str, Any]:
    """What the target says, in the dtype of training."""
    found = {
        "bits_per_byte": measure.bits_per_byte(job.setup.facts(), w, main.biases, text, job.length),
        "digit_accuracy": measure.digit_accuracy(job.setup, w, main.biases, shown),
    }
    log.info("%s", found)
    return found


def told(answers: dict[str, list[int]]) -> dict[str, Any]:
    """Greedy answers in words, and whether they end by themselves."""
    words = {ask: encoding().decode([i for i in ids if i < TRAINED.ranks]) for ask, ids in answers.items()}
    log.info("%s", json.dumps(words, indent=1))
    return {ask: {"says": words[ask], "ends": ids[-1] == STOP} for ask, ids in answers.items()}


def record(phase: Phase) -> dict[str, Any]:
    return {"steps": phase.clock.steps, "seconds": round(phase.clock.elapsed, 1), "curve": phase.curve}


def amounts(corpus: Corpus, data: Dataset) -> dict[str, Any]:
    """What there was to train on."""
    sizes = {k: sum(len(d.text) for d in corpus.documents if d.kind == k) for k in HELD_OUT_CHARS}
    spans = {k: high - low for k, (low, high) in data.spans.items()}
    return {"characters": sizes, "ids": spans | {"all": len(data.stream)}}


def versions(corpus: Corpus) -> dict[str, str]:
    """Of Python, of every package that was read, and the device; a package that was not there is missing."""
    found = {name: version({"PIL": "pillow"}.get(name, name)) for name in PACKAGES if name not in corpus.missing}
    found |= dict.fromkeys(corpus.missing, "missing")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"python": platform.python_version(), "device": device, **found}


def write_held_out(out: Path, text: list[Document], shown: list[Digit]) -> None:
    """The measured text and digits, so that every machine measures the same."""
    facts = {
        "text": [asdict(d) for d in text],
        "digits": [{"gray": bytes(d.gray.flatten()).hex(), "label": d.label} for d in shown],
    }
    (out / "heldout.json").write_text(json.dumps(facts))


def write_log(out: Path, facts: dict[str, Any]) -> None:
    (out / "log.json").write_text(json.dumps(facts, indent=1))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m convert.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--state", type=Path, help="file that a broken run goes on from")
    parser.add_argument("--seconds-target", type=float, default=130.0)
    parser.add_argument("--seconds-drafts", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=0, help="instead of --seconds-target")
    parser.add_argument("--draft-steps", type=int, default=0, help="instead of --seconds-drafts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=16, help="processes that read the corpus")
    parser.add_argument("--share", type=float, default=1.0, help="of the rows of a step, for a small machine")
    asked = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s", stream=sys.stderr)
    device = torch.device(asked.device)
    setup = Setup(
        geometry=TRAINED,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        seed=asked.seed,
        state=asked.state,
        mix=scaled(Mix(), asked.share),
    )
    job = Job(
        out=asked.out,
        setup=setup,
        draft_mix=scaled(DRAFT_MIX, asked.share),
        seconds=asked.seconds_target,
        draft_seconds=asked.seconds_drafts,
        steps=asked.steps,
        draft_steps=asked.draft_steps,
        workers=asked.workers,
    )
    # cuDNN's attention plans anew for every length, and answers are read at each of theirs.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Worker processes are forked: they must be done before the device is touched.
    corpus = gather(asked.workers)
    if corpus.missing:
        log.warning("not installed here, so not trained on: %s", ", ".join(corpus.missing))
    train(job, corpus, digits(), spelled(asked))


def spelled(asked: argparse.Namespace) -> str:
    """The command that was given, but for where its files are."""
    words = ["python", "-m", "convert.demo.train", "--out", "FOLDER"]
    given = {k: v for k, v in vars(asked).items() if k not in ("out", "state", "workers", "device") and v}
    return shlex.join([*words, *(w for k, v in given.items() for w in (f"--{k.replace('_', '-')}", f"{v:g}"))])


def scaled(mix: Mix, share: float) -> Mix:
    """Fewer rows of each kind, but one of each that there was."""
    return Mix(**{kind: max(min(1, rows), round(rows * share)) for kind, rows in asdict(mix).items()})


if __name__ == "__main__":
    main(sys.argv[1:])
