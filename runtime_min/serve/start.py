"""An artifact and its engine as what the server serves, and the lines that it starts with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime_min.artifact import Artifact
from runtime_min.request import Bounds
from runtime_min.serve.jobs import Defaults, Served
from runtime_min.text import ChatTemplate, Tokenizer
from runtime_min.version import version_line
from runtime_min.vision.rule import Rule
from runtime_min.vision.sources import Sources
from specs import manifest
from specs.errors import InputError

GENERATION = "generation_config.json"
NAME = "kimi-k2.6"


def served(
    artifact: Artifact,
    bounds: Bounds,
    *,
    name: str = NAME,
    choices: int = 16,
    with_grammars: bool = False,
    root: Path | None = None,
    fetch: Callable[[str, str], bytes] | None = None,
) -> Served:
    """What there is to serve. root, fetch: as for Sources. InputError for a folder that cannot be served."""
    tokenizer = Tokenizer.open(artifact.path)
    grammars: Any = None
    if with_grammars:
        from runtime_min.serve.grammar import Grammars

        grammars = Grammars(tokenizer)
    sources = Sources(rule=Rule.open(artifact.path), root=root, fetch=fetch) if bounds.sees else None
    return Served(
        name=name, tokenizer=tokenizer, template=ChatTemplate.open(artifact.path), bounds=bounds,
        defaults=defaults(artifact.path), choices=choices, sources=sources, grammars=grammars,
    )  # fmt: skip


def defaults(folder: Path) -> Defaults:
    """What generation_config.json says of sampling, and OpenAI's defaults for the rest."""
    path = folder / GENERATION
    found = manifest.read_json(path) if path.is_file() else {}
    stated = {k: found[k] for k in Defaults.__slots__ if found.get(k) is not None}
    wrong = [f"{path}: {k}: found {v!r}, expected a number" for k, v in stated.items() if type(v) not in (int, float)]
    if wrong:
        raise InputError(wrong)
    return Defaults(**stated)


def lines(artifact: Artifact, what: Served, about: tuple[str, ...]) -> list[str]:
    """What whoever starts the server looks for, on one screen."""
    sealed = artifact.manifest
    source = sealed["source"]
    model = f"{source['repo']} at {source['revision']}" if source["repo"] else "a local checkpoint"
    default = what.defaults
    return [
        f"{version_line()}: {artifact.path}, format {sealed['version']}, digest {sealed['digest'][:12]}",
        f"model: {what.name}, made from {model}; {artifact.nbytes / 1e9:.2f} GB a rank",
        *about,
        f"parsers: Kimi's reasoning and tool calls; grammars: {'xgrammar' if what.grammars else 'no extra `grammar`'}",
        f"sampling, unless a request says otherwise: temperature {default.temperature:g}, top_p {default.top_p:g}, "
        f"top_k {default.top_k or 'off'}",
    ]
