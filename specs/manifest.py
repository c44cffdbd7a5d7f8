"""The artifact's table of contents: manifest.json, and one index.json beside the weights of every store."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specs.errors import ArtifactError

FORMAT = "kiln-artifact"
VERSION = (1, 0)
NAME = "manifest.json"
NEEDED: dict[str, type] = {
    "plan": str,
    "model": dict,
    "mesh": dict,
    "layouts": list,
    "source": dict,
    "logical": dict,
    "coverage": dict,
    "files": list,
    "digest": str,
}


def canonical(value: object) -> bytes:
    """JSON bytes that depend on the value alone."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def seal(body: Mapping[str, Any]) -> bytes:
    """JSON bytes of `body` and its own digest."""
    return canonical({**body, "digest": hashlib.sha256(canonical(body)).hexdigest()})


def intact(value: Mapping[str, Any]) -> bool:
    """Is this what `seal` sealed?"""
    body = {k: v for k, v in value.items() if k != "digest"}
    return hashlib.sha256(canonical(body)).hexdigest() == value.get("digest")


def sealed(body: Mapping[str, Any]) -> bytes:
    """manifest.json for a body without format, version and digest."""
    return seal({"format": FORMAT, "version": "{}.{}".format(*VERSION), **body})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of an artifact; ArtifactError names the file if it is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise ArtifactError(f"{path}: cannot be read: {e}") from e
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: found a {type(value).__name__}, expected an object")
    return value


def read(folder: Path) -> dict[str, Any]:
    """The manifest of an artifact folder, checked as far as it speaks of itself.

    Raises ArtifactError for a missing (unsealed), foreign, newer or altered manifest. Any minor version of this
    major is read.
    """
    path = folder / NAME
    if not path.is_file():
        raise ArtifactError(f"{path}: not there, so {folder} is no finished artifact; `kiln convert` writes it last")
    m = read_json(path)
    if m.get("format") != FORMAT:
        raise ArtifactError(f"{path}: is not a {FORMAT} manifest")
    major = str(m.get("version")).split(".")[0]
    if major != str(VERSION[0]):
        raise ArtifactError(
            f"{path}: format version {m.get('version')!r}, this kiln reads {VERSION[0]}.x; "
            "convert the source again or use the kiln that wrote it"
        )
    problems = [
        f"{path}: {k}: found {type(m.get(k)).__name__}, expected {t.__name__}"
        for k, t in NEEDED.items()
        if not isinstance(m.get(k), t)
    ]
    if not isinstance(parts := m.get("parts", []), list) or not all(isinstance(part, str) for part in parts):
        problems.append(f"{path}: parts: found {parts!r}, expected a list of names")
    if problems:
        raise ArtifactError(problems)
    if not intact(m):
        raise ArtifactError(f"{path}: its digest does not fit its contents; the manifest was changed after sealing")
    return m


def has_vision(m: Mapping[str, Any]) -> bool:
    """Does the artifact hold the vision part? One that does not list its parts holds all of them."""
    return "vision" in m.get("parts", ("vision",))


def logical_digest(lines: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """sha256 over `name dtype shape sha256(bytes)` lines of source tensors, sorted by name.

    name -> (dtype, shape, sha256); the same whatever layout, mesh or file split. `weight_shape` labels are left out.
    """
    digest = hashlib.sha256()
    for name in sorted(lines):
        dtype, shape, sha = lines[name]
        if not name.endswith(".weight_shape"):
            digest.update(f"{name} {dtype} {'x'.join(map(str, shape))} {sha}\n".encode())
    return digest.hexdigest()
