"""provenance.json: who, when, where and with what. Outside every digest but its own: same input, same bytes."""

import json
import platform
import time
from importlib.metadata import version
from pathlib import Path

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


def problems(folder: Path) -> list[str]:
    """What is wrong with an artifact's provenance.json: not one byte may differ from what was written."""
    path = folder / NAME
    if not path.is_file():
        return [f"{path}: not there; nothing else depends on it, convert again to have one"]
    try:
        raw = path.read_bytes()
        facts = json.loads(raw)
    except (OSError, ValueError, RecursionError) as e:
        return [f"{path}: cannot be read: {e}"]
    body = {k: v for k, v in facts.items() if k != "digest"} if isinstance(facts, dict) else {}
    return [] if raw == manifest.seal(body) else [f"{path}: was changed after it was written"]
