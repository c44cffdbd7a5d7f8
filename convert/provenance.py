"""provenance.json: when, where and with what. Outside every digest but its own: same input, same bytes.

It stays with who converted: host, paths and command are not published, and an artifact is whole without them.
"""

import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from convert.readers.source import Source
from specs import manifest

NAME = "provenance.json"
PACKAGES = ("kiln", "torch", "safetensors", "numpy")


def provenance(command: str, source: Source) -> bytes:
    """The file for a conversion that ends now."""
    facts = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command,
        "host": platform.node(),
        "python": platform.python_version(),
        "packages": {p: version(p) for p in PACKAGES},
        "source_path": str(source.path),
        "source_state": source.state,
    }
    return manifest.seal(facts)


def read(folder: Path) -> dict[str, Any]:
    """An artifact's provenance, empty if it came without; ArtifactError if it cannot be read."""
    path = folder / NAME
    return manifest.read_json(path) if path.exists() else {}


def problems(folder: Path) -> list[str]:
    """What is wrong with an artifact's provenance.json, if it has one: no byte may differ from what was written."""
    path = folder / NAME
    if not path.exists():
        return []
    try:
        raw = path.read_bytes()
        facts = json.loads(raw)
    except (OSError, ValueError, RecursionError) as e:
        return [f"{path}: cannot be read: {e}"]
    body = {k: v for k, v in facts.items() if k != "digest"} if isinstance(facts, dict) else {}
    return [] if raw == manifest.seal(body) else [f"{path}: was changed after it was written"]
