"""Accept lengths of the trained model's drafts: python benchmarks/acceptance.py [NAME of NAME.json and NAME.md]

Converts the shipped model with its drafts and runs `kiln-run bench spec` on the CPU for each draft, number of tokens
and temperature, over the prompts of the model's card. Acceptance does not depend on the machine; speeds do, and are not
taken from here.
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from trained import MORE

from convert.demo import shipped
from convert.demo.training.measure import PROMPTS
from runtime_min.bench.report import grid, page, write

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "acceptance-trained"
# (draft, tokens in a row, nodes of a tree or 0).
WAYS = [
    *((d, k, 0) for d in ("eagle3_mla", "eagle3_llama") for k in (1, 2, 3, 4, 6)),
    *(("dflash", k, 0) for k in (1, 3, 5, 7)),
    *((d, k, 16) for d, k in (("eagle3_mla", 4), ("eagle3_llama", 4), ("dflash", 7))),
]
TEMPERATURES = (0.0, 1.0)
MAX_TOKENS = 96
OPTIONS = [
    "--device", "cpu", "--context", "2048", "--cache-tokens", "16384", "--no-spec-adaptive",
    "--max-tokens", str(MAX_TOKENS), "--json",
]  # fmt: skip


def kiln(module: str, *words: object) -> str:
    done = subprocess.run([sys.executable, "-m", module, *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"failed: {module} {words}")
    return done.stdout


def measured(folder: Path) -> list[dict[str, Any]]:
    """What `bench spec` says of every way at every temperature."""
    model, artifact, prompts = folder / "model", folder / "artifact", folder / "prompts.txt"
    shipped.write_shipped(model)
    drafts = [w for name in shipped.DRAFTS for w in ("--draft", shipped.drafts_of(model) / name)]
    kiln("convert", "convert", model, "--tp", 1, "--out", artifact, *drafts)
    prompts.write_text("\n".join((*PROMPTS, *MORE)) + "\n")
    rows = []
    for draft, tokens, tree in WAYS:
        for temperature in TEMPERATURES:
            asked = ("--draft", draft, "--spec-tokens", tokens, "--temperature", temperature, "--prompts", prompts)
            grown = ("--spec-tree-budget", tree) if tree else ()
            said = json.loads(kiln("runtime_min", "bench", "spec", artifact, *OPTIONS, *asked, *grown))
            keys = ("mean_accept_length", "draft_acceptance_rate", "per_position", "drafts", "same_as_plain")
            rows.append(
                {"draft": draft, "tokens": tokens, "tree": tree, "temperature": temperature}
                | {k: said[k] for k in keys}
                | {"answer_tokens": said["tokens"]}
            )
            print(rows[-1], file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    head = ("draft", "tokens in a row", "tree", "temperature", "mean accept length", "acceptance", "by position")
    told = (
        (
            r["draft"], str(r["tokens"]), str(r["tree"] or ""), f"{r['temperature']:g}",
            f"{r['mean_accept_length']:.2f}", f"{r['draft_acceptance_rate']:.2f}",
            " ".join(f"{p:.2f}" for p in r["per_position"]),
        )
        for r in rows
    )  # fmt: skip
    return page("Accept lengths of the trained model's drafts", facts, grid(head, told, 1))


def main(result: Path) -> None:
    facts = {
        "command": "python benchmarks/acceptance.py",
        "prompts": f"{len(PROMPTS) + len(MORE)} of the model's card, answers of at most {MAX_TOKENS} tokens, seed 0",
        "torch": torch.__version__, "Python": platform.python_version(), "machine": "CPU, float32",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder))
    write(result, table(rows, facts), facts, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT)
