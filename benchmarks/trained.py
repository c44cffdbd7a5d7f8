"""Measures the trained model as the engine serves it, and writes its card: figures, Markdown and the loss curve.

python benchmarks/trained.py [FOLDER of a training run, whose files are taken into the package first]
"""

import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from convert.demo import shipped
from convert.demo.training.measure import PROMPTS
from runtime_min.artifact import Artifact
from runtime_min.bench.quality import answers, bits_per_byte, question
from runtime_min.core import Core
from runtime_min.engine import Engine
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.ops import REF
from runtime_min.ranks import Ranks
from runtime_min.request import Limits
from runtime_min.text import Tokenizer
from tests.lab import converted
from tests.trained import SAMPLE, digit_answers, digit_pictures

ROOT = Path(__file__).parent.parent
DATA = ROOT / "convert" / "demo" / "data" / "trained"
DOCS = ROOT / "docs"
# Further prompts to choose pinned outputs from: those without a near tie.
MORE = (
    "What is Python?",
    "What does os.listdir do?",
    "What is the module `random` for?",
    "Tell me about collections.",
    "How many days are in a week?",
    "What is a tuple?",
    "What is the capital of Japan?",
    "How do I write a loop?",
    "What does len do?",
    "Describe the class `ValueError`.",
    "Thank you",
    "What color is the sky?",
    "What is a dictionary?",
    "What is the module `shutil` for?",
)
GAP = 1e-3
PINNED = 10


def take(run: Path) -> None:
    """A training run's files into the package."""
    shutil.rmtree(DATA, ignore_errors=True)
    for name in ("target", *shipped.DRAFTS):
        shutil.copytree(run / name, DATA / name)
    for name in ("log.json", "heldout.json"):
        shutil.copyfile(run / name, DATA / name)


def measured(folder: Path) -> dict[str, Any]:
    """The figures that tests compare with, of one rank on the CPU."""
    shipped.write_shipped(folder / "model")
    converted(folder / "model", folder / "artifact")
    artifact, tokenizer = Artifact.open(folder / "artifact"), Tokenizer.open(folder / "artifact")

    def decoder(dtype: torch.dtype) -> Decoder:
        how = Settings(dtype=dtype, device=torch.device("cpu"), positions=2048)
        return Decoder.load(artifact, REF, Ranks(0, artifact.mesh), how)

    texts = [d["text"] for d in shipped.facts("heldout")["text"]]
    plain = decoder(torch.float32)
    asked = (*PROMPTS, *MORE)
    with Engine.over(Core(decoder(torch.float64), Limits(cache_tokens=8192))) as engine:
        said = answers(engine, tokenizer, [question(artifact, tokenizer, p) for p in asked])
    known = {p: asdict(a) for p, a in zip(asked, said, strict=True)}
    shown = digit_answers(folder / "artifact", digit_pictures())
    return {
        "bits_per_byte": bits_per_byte(plain, tokenizer, texts),
        "bits_per_byte_sample": bits_per_byte(plain, tokenizer, texts[:SAMPLE]),
        "digit_accuracy": sum(shown) / len(shown),
        "prompts": {p: known[p] for p in PROMPTS},
        "pinned": dict([(p, a) for p, a in known.items() if a["gap"] > GAP][:PINNED]),
    }


def curve(points: list[dict[str, float]], width: int = 640, height: int = 320) -> str:
    """The target's loss over its steps as SVG."""
    pad, most = 40, max(p["loss"] for p in points)
    last = max(p["step"] for p in points) or 1

    def at(step: float, loss: float) -> str:
        x, y = pad + (width - 2 * pad) * step / last, height - pad - (height - 2 * pad) * loss / most
        return f"{x:.1f},{y:.1f}"

    line = " ".join(at(p["step"], p["loss"]) for p in points)
    ticks = "".join(
        f'<text x="4" y="{at(0, v).split(",")[1]}">{v}</text>' for v in range(0, int(most) + 1, 2)
    )  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>{ticks}'
        f'<path d="M{at(0, most)} L{at(0, 0)} L{at(last, 0)}" fill="none" stroke="black"/>'
        f'<polyline points="{line}" fill="none" stroke="#1f5fbf" stroke-width="1.5"/>'
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">step (of {last + 1})</text>'
        f'<text x="{pad}" y="20">loss, nats a token</text></svg>\n'
    )


def table(head: str, rows: list[tuple[object, ...]]) -> list[str]:
    columns = head.count("|") + 1
    return [f"| {head} |", "|" + "---|" * columns, *("| " + " | ".join(map(str, r)) + " |" for r in rows), ""]


def markdown(log: dict[str, Any], card: dict[str, Any]) -> str:
    """The model card."""
    target, drafts, v = log["target"], log["drafts"], log["versions"]
    ids, rounds = log["ids"], log["tokens_a_round"]
    packages = ", ".join(f"{n} {x}" for n, x in v.items() if n not in ("python", "device"))
    megabytes = {n: sum(f.stat().st_size for f in (DATA / n).iterdir()) / 1e6 for n in ("target", *shipped.DRAFTS)}
    ends = sum(a["ends"] for a in card["prompts"].values())
    return "\n".join(
        [
            "# The small trained model",
            "",
            "A model of Kimi K2.6's family, small enough to lie in the package: MLA, sigmoid routing over 32 experts",
            "of which a token uses four, a shared expert, YaRN, a vision tower, experts in INT4, and three speculative",
            "drafts. It shows that the tools work; it is no source of knowledge. Its licence is this project's.",
            "",
            "## Data",
            "",
            f"Documentation and sources that lie on any machine with the required packages: Python {v['python']}",
            f"(PSF licence), {packages}: their docstrings, each under its package's licence (BSD, MIT, Apache-2.0,",
            "HPND). Conversations are made from the standard library's docstrings, and from the questions and answers",
            "in `convert/demo/data/talk.json`. Pictures are scikit-learn's handwritten digits (UCI, CC BY 4.0),",
            "letters in Pillow's own font, and coloured shapes. One document in forty, by the hash of its name, was",
            "held out, and one digit in eight.",
            "",
            *table("text | characters | ids", [(k, f"{n:,}", f"{ids[k]:,}") for k, n in log["characters"].items()]),
            "## Training",
            "",
            f"`{log['command']}` on {v['device']}: {target['steps']:,} steps in {target['seconds']} s, the drafts",
            f"{drafts['steps']:,} steps in {drafts['seconds']} s, {log['seconds']} s in all, seed {log['seed']}. With",
            f"`--steps {target['steps']} --draft-steps {drafts['steps']}` the same batches and rates are used again.",
            "",
            "![loss](model-loss.svg)",
            "",
            "## Figures",
            "",
            *table(
                "figure | value",
                [
                    ("bits per byte, held-out text, float32", f"{card['bits_per_byte']:.4f}"),
                    ("held-out digits named", f"{100 * card['digit_accuracy']:.1f} %"),
                    ("listed prompts that end by themselves", f"{ends} of {len(card['prompts'])}"),
                ],
            ),
            *table(
                "part | megabytes | tokens a round on its own greedy answers",
                [(n, f"{m:.2f}", f"{rounds[n]:.2f}" if n in rounds else "") for n, m in megabytes.items()],
            ),
            "EAGLE3 proposes four tokens a round here, DFlash a block of seven; one token a round is plain decoding.",
            "",
            "## Answers",
            "",
            *table(
                "prompt | greedy answer, float64",
                [(p, a["says"].replace("\n", " ⏎ ").replace("|", "\\|")) for p, a in card["prompts"].items()],
            ),
        ]
    )


def main(run: Path | None) -> None:
    if run is not None:
        take(run)
    with tempfile.TemporaryDirectory() as folder:
        card = measured(Path(folder))
    (DATA / "card.json").write_text(json.dumps(card, indent=1))
    log = shipped.facts("log")
    DOCS.mkdir(exist_ok=True)
    (DOCS / "model-loss.svg").write_text(curve(log["target"]["curve"]))
    (DOCS / "model-card.md").write_text(markdown(log, card))
    print({k: card[k] for k in ("bits_per_byte", "bits_per_byte_sample", "digit_accuracy")})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
