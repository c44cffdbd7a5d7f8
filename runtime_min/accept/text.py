"""Tokenizer and template against the release: digests, special ids, renderings."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from runtime_min.accept.report import Finding
from runtime_min.artifact import sha256
from runtime_min.text import ChatTemplate, Tokenizer
from specs.errors import InputError

# Of the K2.6 release at 7eb5002f6aadc958aed6a9177b7ed26bb94011bb. Source: digests that several projects publish.
RELEASED = {
    "config.json": "85825ca6e18cbe539eb83ee09eedfb3f4222265929f06e9f535a6d9364f55899",
    "tiktoken.model": "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103",
    "tokenizer_config.json": "12fcab43d2b6068f46769f5ff373960bf7c17a94d7abbc50e2491306b2f6cf58",
    "chat_template.jinja": "8bf859698fd4781c0e1e1c63ce74422aab27e53ccc5f47116317c64cda06132f",
}


def digests(folder: Path) -> Finding:
    """Are the files the released ones? Another digest fails: whoever changed a file on purpose knows which."""
    paths = {name: folder / name for name in RELEASED}
    found = {name: sha256(path) if path.is_file() else None for name, path in paths.items()}
    other = [name for name, digest in found.items() if digest != RELEASED[name]]
    said = "all are the released files" if not other else f"not the released ones: {', '.join(other)}"
    return Finding(name="digests", verdict="fail" if other else "pass", said=said, facts=found)


def renderings(folder: Path) -> Finding:
    """Conversations with known prompts, through this artifact's template; and every prompt through its tokenizer."""
    cases: list[dict[str, Any]] = json.loads(files("runtime_min.accept").joinpath("golden.json").read_text())
    wrong: dict[str, Any] = {}
    try:
        template, tokenizer = ChatTemplate.open(folder), Tokenizer.open(folder)
        for case in cases:
            pieces = template.pieces(case["messages"], case.get("tools"), **case.get("options", {}))
            text = "".join(p.text for p in pieces)
            if text != case["prompt"]:
                wrong[case["name"]] = {"found": text, "expected": case["prompt"]}
            elif tokenizer.decode(tokenizer.encode_pieces(pieces)) != text:
                wrong[case["name"]] = {"found": "the ids of the prompt are not its text"}
    except InputError as e:
        wrong["template"] = str(e)
    said = f"{len(cases) - len(wrong)} of {len(cases)} are as known"
    return Finding(name="renderings", verdict="fail" if wrong else "pass", said=said, facts=wrong)
