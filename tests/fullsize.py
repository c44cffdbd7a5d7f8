"""The real checkpoint's headers around files of holes: 554 GiB that take no room."""

import json
from collections import defaultdict
from pathlib import Path

from specs.fold import unfold
from specs.storage import nbytes

FIXTURES = Path(__file__).parent / "fixtures"
Header = dict[str, tuple[str, tuple[int, ...]]]


def k26_header() -> Header:
    """Every tensor of the released checkpoint: name -> (dtype, shape)."""
    return dict(unfold(json.loads((FIXTURES / "kimi_k2_6.header.json").read_text())))


def k26_config() -> dict[str, object]:
    config: dict[str, object] = json.loads((FIXTURES / "kimi_k2_6.config.json").read_text())
    return config


def shard_of(name: str) -> int:
    """The file a tensor lies in: a layer each, then embedding and head, projector, vision tower."""
    if ".layers." in name and name.startswith(("language_model.", "model.")):
        return int(name.split(".layers.")[1].split(".")[0]) + 1
    return 63 if name.startswith("mm_projector") else 64 if name.startswith("vision_tower") else 62


def write_sparse(folder: Path, header: Header, config: dict[str, object]) -> None:
    """A checkpoint folder whose files have exact headers and sizes, and holes for data."""
    folder.mkdir(parents=True)
    shards: dict[int, Header] = defaultdict(dict)
    for name, signature in header.items():
        shards[shard_of(name)][name] = signature
    names = {s: f"model-{s:05d}-of-{max(shards):06d}.safetensors" for s in shards}
    for shard, tensors in shards.items():
        entries, at = {}, 0
        for name, (dtype, shape) in tensors.items():
            size = nbytes(shape, dtype)
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        raw = json.dumps(entries).encode()
        with (folder / names[shard]).open("wb") as f:
            f.write(len(raw).to_bytes(8, "little") + raw)
            f.truncate(8 + len(raw) + at)
    weight_map = {n: names[s] for s, tensors in shards.items() for n in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
