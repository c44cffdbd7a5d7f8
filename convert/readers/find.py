"""MODEL on the command line -> a Source: an artifact folder, a checkpoint folder, or a hub id."""

from pathlib import Path

from convert.readers import hub
from convert.readers.safetensors_dir import SafetensorsDir
from convert.readers.source import Source
from specs import manifest
from specs.errors import SourceError


def find(model: str, headers_only: bool = False, stream: bool = False) -> Source:
    """Opens MODEL; SourceError if it is none of the three. stream: a hub id without a local copy of its weights."""
    path = Path(model)
    if path.is_dir():
        if (path / manifest.NAME).exists():
            from convert.readers.artifact import ArtifactSource

            return ArtifactSource(path)
        return SafetensorsDir(path)
    named = hub.parse_id(model)
    if path.exists() or named is None or model.startswith(("/", ".")):
        state = "is a file" if path.exists() else "does not exist"
        raise SourceError(
            f"{model}: {state}; MODEL is a checkpoint folder, an artifact folder or a hub id like owner/name@revision"
        )
    if stream:
        from convert.readers.hub_stream import HubStream

        return HubStream(*named)
    return hub.HubHeaders(*named) if headers_only else SafetensorsDir(hub.download(*named))
