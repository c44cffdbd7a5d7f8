"""Trained weights as files: the target in the checkpoint's format, each draft in its own."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convert.demo.checkpoint import siblings, write_checkpoint
from convert.demo.geometry import Geometry, config
from convert.demo.inventory import TensorSpec, shards
from convert.demo.stream import write_file, write_text
from convert.demo.training.tokens import rank_text

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}


def write_target(out: Path, geometry: Geometry, tensors: Mapping[str, Tensor]) -> None:
    """The checkpoint folder. Raises PlanError for an occupied folder or a full disk."""
    beside = siblings(geometry, "k2.6", config(geometry), rank_text())
    write_checkpoint(out, shards(geometry), beside, lambda: lambda specs: _payloads(specs, tensors))


def write_draft(out: Path, stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A draft's folder: config.json and model.safetensors."""
    out.mkdir(parents=True, exist_ok=True)
    specs = [
        TensorSpec(name=n, dtype=DTYPES[t.dtype], shape=tuple(t.shape))  # type: ignore[arg-type]
        for n, t in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    ]
    write_text(out / "config.json", json.dumps(stated, indent=2))
    write_file(out / "model.safetensors", specs, _payloads(specs, tensors), lambda _: None)


def _payloads(specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor]) -> Iterator[Iterator[memoryview]]:
    for spec in specs:
        tensor = tensors[spec.name].contiguous()
        assert DTYPES[tensor.dtype] == spec.dtype and tuple(tensor.shape) == spec.shape, spec.name
        yield iter((tensor.flatten().view(torch.uint8).numpy().data,))
