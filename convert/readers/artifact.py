"""An artifact is a Source too: every source tensor comes back, bit for bit, from the parts of all ranks."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convert.readers.files import Files
from convert.readers.sealed import Entry, read_indices, read_sealed
from convert.readers.source import Identity, side_files
from convert.repack.assemble import MOVED_AS
from convert.shard.plan import Store, form, store, ways
from runtime_min.kernels.layouts import Int4Groups, layout
from specs import manifest
from specs.config import read_config
from specs.dims import ModelConfig
from specs.draft import KINDS, DraftConfig, read_draft_config
from specs.errors import ArtifactError, SourceError
from specs.expand import Expanded, Item, check_header, expand, tensor_names
from specs.fold import unfold
from specs.limits import check_sizes
from specs.mesh import cut
from specs.schema import load
from specs.storage import ITEM_BYTES


class ArtifactSource:
    """The source tensors behind an artifact. Not for serving: the runtime maps the parts as they are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sealed = sealed = read_sealed(path)
        sealed.require_whole()
        if problems := sealed.small_problems():
            raise ArtifactError(problems)
        self.manifest, self.mesh = sealed.manifest, sealed.mesh
        self.config: Mapping[str, Any] = self._config(manifest.read_json(path / "config.json"))
        self.header = dict(unfold(self.manifest["coverage"]["consumed"]))
        config = self._model()
        if isinstance(config, ModelConfig):
            check_sizes(config, len(self.header))
        self.expanded: Expanded = expand(load(self.manifest["model"]["spec"]), config, self.header)
        check_header(self.expanded, self.header)
        source = self.manifest["source"]
        self.identity = Identity(repo=source["repo"], revision=source["revision"], files=tuple(source["files"]))
        self.state: str = self.manifest["digest"]
        self.logical: Mapping[str, str] | None = self.manifest["logical"]
        self._items: dict[str, list[tuple[Item, int, int]]] = defaultdict(list)
        for item in self.expanded.items:
            for e, stems in enumerate(item.sources):
                for j, stem in enumerate(stems):
                    for name in tensor_names(item.family.row.format, stem):
                        self._items[name].append((item, e, j))
        self.entries = read_indices(sealed)
        self._files = Files()
        self._last = threading.local()

    def _config(self, whole: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json as far as the artifact goes: one made with --text-only carries it whole, and no vision part."""
        left_out = not manifest.has_vision(self.manifest)
        return {k: v for k, v in whole.items() if not (left_out and k == "vision_config")}

    def _model(self) -> ModelConfig | DraftConfig:
        if self.manifest["model"]["spec"] in KINDS.values():
            return read_draft_config(self.config, self.manifest.get("target_layers"))
        return read_config(self.config)

    def rows(self, name: str, low: int, high: int) -> Tensor:
        """Rows low..high of a source tensor's first axis, as flat uint8; SourceError if a part is damaged."""
        item, e, j = self._items[name][0]
        if item.family.row.format == "dense":
            return self._dense(name, low, high)
        suffix = name.rsplit(".", 1)[1]
        if suffix == "weight_shape":
            dtype = torch.int32 if self.header[name][0] == "I32" else torch.int64
            return torch.tensor(item.family.stored(j), dtype=dtype)[low:high].view(torch.uint8)
        matrix = self._expert(item, e)[j]
        part = matrix.words if suffix == "weight_packed" else matrix.scales
        return part[low:high].contiguous().view(torch.uint8).flatten()

    def soon(self, name: str, low: int, high: int) -> None:
        """Nothing: a tensor's bytes are spread over many files, and the kernel reads each ahead by itself."""

    def stage(self, jobs: Mapping[int, Collection[str]], folder: Path) -> None:
        """Nothing: the files are here."""

    def leading(self, name: str) -> int:
        """`rows` takes multiples of this: stored rows of one index of the logical first axis (a head's rows)."""
        item, _, j = self._items[name][0]
        return item.family.stored(j)[0] // item.family.shapes[j][0]

    def side_files(self) -> Iterator[Path]:
        """As sealed: what was added to the folder later is not taken along."""
        yield from (p for p in side_files(self.path) if p.name in self.sealed.small)

    def __reduce__(self) -> tuple[type[ArtifactSource], tuple[Path]]:
        """Another process opens its own."""
        return ArtifactSource, (self.path,)

    def close(self) -> None:
        self._files.close()

    def _expert(self, item: Item, e: int) -> list[Int4Groups]:
        """All fused sources of one expert, unpacked from every rank with a part; each thread keeps its last one."""
        if getattr(self._last, "key", None) == (item.name, e):
            kept: list[Int4Groups] = self._last.value
            return kept
        family, how = item.family, form(item.family, self.mesh)
        _, n = ways(family, self.mesh)
        fused = (sum(s[0] for s in how.shapes), how.shapes[0][1])
        slices: list[list[Int4Groups]] = [[] for _ in how.shapes]
        for part in range(n):
            whole = self._slot(item, e, part, fused)
            at = 0
            for j, (rows, _) in enumerate(how.shapes):
                slices[j].append(whole.cut(0, at, at + rows))
                at += rows
        value = [Int4Groups.fuse(s) if family.split_axis == 0 else Int4Groups.join(s) for s in slices]
        self._last.key, self._last.value = (item.name, e), value
        return value

    def _slot(self, item: Item, e: int, part: int, shape: tuple[int, int]) -> Int4Groups:
        """One rank's packed slot of expert e, unpacked."""
        axis, n = ways(item.family, self.mesh)
        for rank in range(self.mesh.world):
            if n > 1 and self.mesh.index(axis, rank) != part:
                continue
            for entry in self.entries["rank", rank].get(item.name, ()):
                first, stop = entry["experts"]
                if first <= e < stop:
                    size = entry["shape"][1] * ITEM_BYTES["I32"]
                    raw = self._read(entry, rank, entry["offset"] + (e - first) * size, size)
                    parameters = {k: v for k, v in entry["layout"].items() if k != "id"}
                    unpacked: Int4Groups = layout(entry["layout"]["id"], parameters).unpack(
                        raw.view(torch.int32), shape
                    )
                    return unpacked
        raise ArtifactError(f"{self.path}: {item.name}: no index.json names expert {e}, part {part} of {n}")

    def _dense(self, name: str, low: int, high: int) -> Tensor:
        """Leading rows of a dense source, put together from its items and their cuts."""
        first, _, j = self._items[name][0]
        shape = first.family.shapes[j]
        merged = self.leading(name)
        assert low % merged == 0 and high % merged == 0, f"{name}: rows {low}..{high} cut a head"
        low, high = low // merged, high // merged
        out = torch.empty((high - low, *shape[1:]), dtype=MOVED_AS[first.family.row.dtype])
        for item, _, source in self._items[name]:
            target = out
            if item.family.take is not None:
                axis, start, stop = item.family.take
                target = out.narrow(axis, start, stop - start)
            self._fill(target, item, source, low, high)
        return out.view(torch.uint8).flatten()

    def _fill(self, target: Tensor, item: Item, source: int, low: int, high: int) -> None:
        family, how = item.family, form(item.family, self.mesh)
        axis, n = ways(family, self.mesh)
        local = how.shapes[source]
        base = sum(s[0] for s in how.shapes[:source])
        kind = store(family, self.mesh)
        for part in range(n):
            rank = (
                next(r for r in range(self.mesh.world) if n == 1 or self.mesh.index(axis, r) == part)
                if kind == "rank"
                else 0
            )
            start, stop, place = low, high, target
            if n > 1 and family.split_axis == 0:
                first, last = cut(family.shapes[source][0], n, part)
                start, stop = max(low, first), min(high, last)
                if start >= stop:
                    continue
                place = target[start - low : stop - low]
                start, stop = start - first, stop - first
            elif n > 1 and family.split_axis is not None:
                size = local[family.split_axis]
                place = target.narrow(family.split_axis, part * size, size)
            place.copy_(self._local(item, kind, rank, base + start, base + stop, local[1:]))

    def _local(self, item: Item, kind: Store, rank: int, low: int, high: int, tail: tuple[int, ...]) -> Tensor:
        """Rows of one stored plain tensor."""
        found = self.entries[kind, rank].get(item.name)
        if not found:
            raise ArtifactError(f"{self.path}: {item.name}: no index.json of {kind} {rank} names it")
        row = prod(tail) * ITEM_BYTES[item.family.row.dtype]
        raw = self._read(found[0], rank, found[0]["offset"] + low * row, (high - low) * row)
        return raw.view(MOVED_AS[item.family.row.dtype]).view(high - low, *tail)

    def _read(self, entry: Entry, rank: int, start: int, size: int) -> Tensor:
        try:
            return self._files.read(entry["path"], start, size, entry["name"])
        except SourceError as e:
            raise ArtifactError(e.problems) from e
