"""The trained model among this package's files: its checkpoint, its drafts, and what is known of it."""

import json
import shutil
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from specs.errors import PlanError

DRAFTS = ("eagle3_mla", "eagle3_llama", "dflash")


def folder() -> Traversable:
    return files("convert.demo") / "data" / "trained"


def facts(name: str) -> Any:
    """One of its JSON files: log, heldout or card."""
    return json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))


def drafts_of(out: Path) -> Path:
    """Where the drafts of a checkpoint in `out` are written: beside it."""
    return out.with_name(f"{out.name}-drafts")


def write_shipped(out: Path) -> None:
    """Copies the checkpoint to `out` and its drafts to the folder beside; the index of the weights comes last.

    Raises PlanError if either is occupied.
    """
    for place in (out, drafts_of(out)):
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise PlanError(f"{place}: already holds files, expected a new or empty folder; choose another")
    with as_file(folder()) as source:
        for name in DRAFTS:
            shutil.copytree(source / name, drafts_of(out) / name)
        index = "model.safetensors.index.json"
        shutil.copytree(source / "target", out, ignore=shutil.ignore_patterns(index), dirs_exist_ok=True)
        shutil.copyfile(source / "target" / index, out / index)
