"""A draft of an artifact on its target's rank: checked, bound, loaded, and told in a few lines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime_min.artifact import Artifact, Stored, cast, load, rank_of
from runtime_min.drafts.dflash import DFlash
from runtime_min.drafts.eagle3 import Eagle3
from runtime_min.models.decoder import Decoder
from specs import manifest
from specs.draft import DraftConfig, check_partner, read_draft_config
from specs.errors import ArtifactError

Draft = Eagle3 | DFlash
# Tensors that a file may lack.
OPTIONAL = ("embed", "head", "d2t")


@dataclass(frozen=True, slots=True)
class Opened:
    """A draft and the lines that say what it is and what it takes from where."""

    draft: Draft
    lines: list[str]


def open_draft(artifact: Artifact, name: str, target: Decoder) -> Opened:
    """The draft in draft/`name` of the target's artifact, on the target's rank, in its dtype.

    Raises ArtifactError for a draft that is not there, damaged, of another target or mesh, or lacks tensors or has
    too many; ConfigError if it does not fit the target.
    """
    path = require(artifact.path, name)
    sealed, entries, phase = rank_of(path, artifact.rank, artifact.verify)
    artifact.phases.append(phase)
    if problems := list(_unbound(sealed, artifact)):
        raise ArtifactError(f"{path}: {p}; convert the draft again for this artifact" for p in problems)
    dims = read_draft_config(manifest.read_json(path / "config.json"), artifact.config.text.layers)
    stored = {e["name"] for e in entries}
    require_names(str(path), dims, stored)
    # The target's embedding is used, so a copy need not take memory.
    loaded, phase = load([e for e in entries if e["name"] != "embed"], target.settings.device)
    artifact.phases.append(phase)
    weights = {n: replace(w, tensor=cast(w.tensor, target.settings.dtype)) for n, w in loaded.items()}
    table = weights["d2t"].tensor.tolist() if "d2t" in weights else None
    lines = check_partner(dims, artifact.config, stored, table)
    return Opened(made(dims, weights, target), [f"draft {name}: {line}" for line in lines])


def require(artifact: Path, name: str) -> Path:
    """The folder of an artifact's draft; ArtifactError that says which ones are there."""
    path = artifact / "draft" / name
    if not path.is_dir():
        held = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        raise ArtifactError(f"{path}: not there; the artifact has {', '.join(held) if held else 'no drafts'}")
    return path


def made(dims: DraftConfig, weights: dict[str, Stored], target: Decoder) -> Draft:
    """One rank's draft of its weights, whatever they came from."""
    return (DFlash if dims.kind == "dflash" else Eagle3)(dims, weights, target)


def _unbound(sealed: Mapping[str, Any], artifact: Artifact) -> Iterator[str]:
    digest, mesh = artifact.manifest["digest"], artifact.manifest["mesh"]
    if sealed.get("target") != digest:
        yield f"was made for a target of digest {sealed.get('target')}, this one has {digest}"
    if sealed["mesh"] != mesh:
        yield f"was cut for {sealed['mesh']}, the target for {mesh}"


def require_names(where: str, dims: DraftConfig, stored: set[str]) -> None:
    """ArtifactError that names every tensor which the forward pass wants and does not find, or does not know."""
    wanted = set(names(dims))
    problems = [f"{where}: {n} is missing" for n in sorted(wanted - stored)]
    problems += [f"{where}: {n} is not known in a draft of this config" for n in sorted(stored - wanted - {*OPTIONAL})]
    if problems:
        raise ArtifactError(f"{p}; convert the draft again" for p in problems)


def names(dims: DraftConfig) -> Iterator[str]:
    """Every tensor that a draft of these sizes cannot do without."""
    ffn = ("mlp.gate_up", "mlp.down")
    if dims.kind == "dflash":
        attention = tuple(f"attn.{n}" for n in ("q", "kv", "o", "q_norm", "k_norm"))
        yield from ("fc", "hidden_norm", "norm")
        for i in range(dims.layers):
            yield from (f"layers.{i}.{n}" for n in ("input_norm", "ffn_norm", *attention, *ffn))
        return
    yield from ("fc", "embed_norm", "hidden_norm", "ffn_norm", "norm", *ffn)
    yield from (f"fc_norms.{i}" for i in range(dims.fc_norms))
    mla = ("qkv_a", "q_a_norm", "kv_a_norm", "q_b", "w_uk", "w_uv", "o")
    yield from (f"attn.{n}" for n in (mla if dims.kind == "eagle3_mla" else ("qkv", "o")))
