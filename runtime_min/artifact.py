"""An artifact as the runtime sees it: one rank's weights, checked first, then mapped and copied. No arithmetic."""

import hashlib
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime_min.kernels.layouts import LAYOUTS
from runtime_min.read import THREADS, Phase, Span, fill
from specs import manifest
from specs.config import read_config
from specs.dims import ModelConfig
from specs.errors import ArtifactError
from specs.mesh import Mesh

READ = 8 << 20
HASHERS = 8
INDEX = "index.json"
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}


@dataclass(frozen=True, slots=True)
class Stored:
    """One weight as it lies in memory, and the layout that explains it.

    tensor: stacked INT4 slots are int32 [experts, slot words]; everything else is the dense tensor itself.
    logical: per fused source, this rank's [N, K] or dense shape.
    """

    tensor: Tensor
    layout: str
    parameters: dict[str, int]
    logical: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One rank's view of an artifact folder. `open` has checked whatever can be checked without a GPU.

    phases: what checking and loading took so far.
    """

    path: Path
    rank: int
    mesh: Mesh
    config: ModelConfig
    manifest: Mapping[str, Any]
    entries: tuple[dict[str, Any], ...]
    verify: bool = True
    phases: list[Phase] = field(default_factory=list, compare=False)

    @classmethod
    def open(cls, path: Path, rank: int = 0, verify: bool = True) -> "Artifact":
        """Rank `rank` of the artifact in `path`.

        Raises ArtifactError, naming every bad file, if the artifact is unsealed, of another format version, damaged
        (size and index always, sha256 of this rank's files with `verify`), or stored in a layout this version does
        not know; and if there is no such rank.
        """
        sealed, entries, phase = rank_of(path, rank, verify)
        config = read_config(manifest.read_json(path / "config.json"))
        return cls(
            path=path, rank=rank, mesh=Mesh(**sealed["mesh"]), config=config, manifest=sealed, entries=entries,
            verify=verify, phases=[phase],
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's text weights."""
        files = {e["path"] for e in self.entries}
        return sum(f.stat().st_size for f in files)

    def weights(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Stored]:
        """Every text weight of this rank on `device`. BF16 tensors become `dtype` if one is given; INT4 slots, and
        FP32 ones unless `dtype` is float64, stay as they are."""
        loaded, phase = load(self.entries, device)
        self.phases.append(phase)
        return {name: replace(w, tensor=cast(w.tensor, dtype)) for name, w in loaded.items()}

    def vision(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Vision tower and projector, whole on every rank, as `dtype` if one is given; checked now, as `open` checks.

        Raises ArtifactError as `require_vision` does, or for damaged files.
        """
        self.require_vision()
        check_files(self.path, [f for f in self.manifest["files"] if f["path"].startswith("vision/")], self.verify)
        loaded, phase = load(read_index(self.path, "vision"), device)
        self.phases.append(phase)
        return {name: cast(w.tensor, dtype) for name, w in loaded.items()}

    @property
    def has_vision(self) -> bool:
        return manifest.has_vision(self.manifest)

    def require_vision(self) -> None:
        """ArtifactError if there is no vision part, saying whether it was left out or never was."""
        if self.config.vision is None:
            raise ArtifactError(f"{self.path}: is a model without a vision tower; it takes no pictures")
        if not self.has_vision:
            raise ArtifactError(
                f"{self.path}: was made with --text-only and takes no pictures; convert again without --text-only"
            )


def rank_of(path: Path, rank: int, verify: bool) -> tuple[dict[str, Any], tuple[dict[str, Any], ...], Phase]:
    """The manifest of an artifact, of a target or a draft, and the tensors of one rank by its index, checked.

    Raises ArtifactError as Artifact.open does.
    """
    sealed = manifest.read(path)
    mesh = Mesh(**sealed["mesh"])
    if not 0 <= rank < mesh.world:
        raise ArtifactError(f"{path}: has ranks 0..{mesh.world - 1} ({mesh}), rank {rank} was asked for")
    listed = {f["path"].rpartition("/")[0] for f in sealed["files"]}
    held = sorted(f[-2:] for f in listed if f.startswith("weights/rank-"))
    # Of a draft for tp 1 every rank has all, and all of it is common.
    if (own := f"weights/rank-{rank:02d}") not in listed and (held or mesh.tp > 1):
        raise ArtifactError(
            f"{path}: holds ranks {', '.join(held)} only, rank {rank:02d} was asked for; convert that one too"
        )
    folders = [f for f in ("weights/common", own) if f in listed]
    mine = [f for f in sealed["files"] if f["path"].rpartition("/")[0] in ("", *folders)]
    phase = check_files(path, mine, verify)
    return sealed, tuple(e for folder in folders for e in read_index(path, folder)), phase


def read_index(path: Path, folder: str) -> list[dict[str, Any]]:
    """The tensors of one folder, each with the `path` of its file; ArtifactError for layouts that are not known."""
    entries = [{**e, "path": path / folder / e["file"]} for e in manifest.read_json(path / folder / INDEX)["tensors"]]
    unknown = sorted({e["layout"]["id"] for e in entries} - set(LAYOUTS))
    if unknown:
        raise ArtifactError(
            f"{path}: stored in {', '.join(unknown)}, this version reads {', '.join(LAYOUTS)}; "
            "convert the artifact again, or use the version that wrote it"
        )
    return entries


def load(
    entries: Iterable[Mapping[str, Any]], device: torch.device, threads: int = THREADS
) -> tuple[dict[str, Stored], Phase]:
    """Index entries, each with the `path` of its file, -> tensors on `device` as stored, and what reading them took."""
    rows: dict[str, int] = {}
    for e in entries:
        rows[e["name"]] = rows.get(e["name"], 0) + e["shape"][0]
    out: dict[str, Stored] = {}
    spans: list[Span] = []
    for e in entries:
        if (name := e["name"]) not in out:
            whole = torch.empty((rows[name], *e["shape"][1:]), dtype=DTYPES[e["dtype"]], device=device)
            how = {k: v for k, v in e["layout"].items() if k != "id"}
            out[name] = Stored(whole, e["layout"]["id"], how, tuple(tuple(s) for s in e["logical"]))
        start = e.get("start", 0)
        spans.append(Span(e["path"], e["offset"], out[name].tensor[start : start + e["shape"][0]]))
    return out, fill(spans, device, threads)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Dense weights in the dtype of the computation."""
    if dtype is None or not tensor.is_floating_point() or (tensor.dtype == torch.float32 and dtype != torch.float64):
        return tensor
    return tensor.to(dtype)


def check_files(path: Path, files: list[dict[str, Any]], verify: bool) -> Phase:
    """ArtifactError with every file that is missing, of another size or, if asked, of another sha256."""
    begin, hashed, problems = time.perf_counter(), 0, []
    for file in files:
        target = path / file["path"]
        if not target.is_file():
            problems.append(f"{target}: not there, expected {file['size']} bytes; fetch or convert again")
        elif target.stat().st_size != file["size"]:
            problems.append(f"{target}: {target.stat().st_size} bytes, expected {file['size']}; fetch or convert again")
    if not problems:
        # Index files are small and lead to everything else, so their bytes are always checked.
        chosen = [f for f in files if verify or not f["path"].endswith(".safetensors")]
        with ThreadPoolExecutor(HASHERS) as pool:
            found = list(pool.map(lambda f: sha256(path / f["path"]), chosen))
        hashed = sum(f["size"] for f in chosen)
        for file, digest in zip(chosen, found, strict=True):
            if digest != file["sha256"]:
                problems.append(
                    f"{path / file['path']}: sha256 {digest}, expected {file['sha256']}; fetch or convert again"
                )
    if problems:
        raise ArtifactError(problems)
    return Phase("check", hashed, time.perf_counter() - begin)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while data := f.read(READ):
            digest.update(data)
    return digest.hexdigest()
