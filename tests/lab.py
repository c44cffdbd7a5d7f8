"""Small checkpoints, conversions of them, and ways to break them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from convert.pipeline import convert
from convert.readers.find import find
from convert.repack.verify import Verdict, verify
from convert.report import Report
from convert.shard.plan import PART_BYTES, Plan, plan
from specs.config import read_config
from specs.mesh import Mesh
from specs.schema import load

Tensors = dict[str, torch.Tensor]


def planned(model: Path | str, part_bytes: int = PART_BYTES, **mesh: int) -> Plan:
    source = find(str(model))
    return plan(load("kimi_k2_6"), read_config(source.config), source.header, Mesh(**mesh), part_bytes)


def converted(model: Path | str, out: Path, workers: int = 2, part_bytes: int = PART_BYTES, **mesh: int) -> Report:
    source = find(str(model))
    made = plan(load("kimi_k2_6"), read_config(source.config), source.header, Mesh(**mesh), part_bytes)
    return convert(made, source, out, workers)


def proven(out: Path, model: Path | str) -> Verdict:
    return verify(out, "full", find(str(model)), workers=2)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, but for provenance.json, which tells time and host."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "provenance.json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def shard_with(folder: Path, tensor: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / str(index["weight_map"][tensor])


def copied(model: Path, out: Path) -> Path:
    return Path(shutil.copytree(model, out))


def edit(folder: Path, tensor: str, change: Callable[[Tensors], object], reindex: bool = True) -> None:
    """Rewrites the file that holds `tensor` after `change`, and the index with it."""
    file = shard_with(folder, tensor)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    if reindex:
        index = folder / "model.safetensors.index.json"
        facts = json.loads(index.read_text())
        facts["weight_map"] = {n: f for n, f in facts["weight_map"].items() if f != file.name} | dict.fromkeys(
            tensors, file.name
        )
        index.write_text(json.dumps(facts))
