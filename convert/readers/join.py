"""Many files' headers and the index over them, joined into one table; every disagreement is named."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from convert.readers.source import TensorInfo
from convert.readers.strict_json import brief
from specs.errors import SourceError

INDEX = "model.safetensors.index.json"
Headers = Mapping[str, Mapping[str, TensorInfo]]


def weight_map(where: str, index: Mapping[str, Any]) -> dict[str, str]:
    """tensor -> file name of a parsed index; SourceError if it has no such map."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise SourceError(f"{where}: weight_map is missing or no map of strings")
    return found


def file_problems(folder: str, mapped: Mapping[str, str], present: Collection[str]) -> Iterator[str]:
    """What is wrong with the file names of a folder's index, given the files beside it."""
    for name in sorted(set(mapped.values()) - set(present)):
        if PurePosixPath(name).name != name:
            yield f"{folder}/{INDEX}: file name {brief(name)} leads out of the folder"
        else:
            yield f"{folder}/{name}: named by {INDEX} but not there; download it again"


def join(headers: Headers, mapped: Mapping[str, str]) -> tuple[dict[str, TensorInfo], list[str]]:
    """All tensors by name, and the disagreements between the headers (by file name) and the index, both ways.

    A file that the index names but `headers` lacks is the caller's to report.
    """
    tensors: dict[str, TensorInfo] = {}
    problems = []
    for name in sorted(headers):
        for tensor, info in headers[name].items():
            if tensor in tensors:
                problems.append(f"{tensor}: is in two files, {tensors[tensor].file} and {info.file}")
            tensors[tensor] = info
            if mapped and mapped.get(tensor) != name:
                told = f"maps it to {mapped[tensor]}" if tensor in mapped else "does not name it"
                problems.append(f"{tensor}: is in {info.file}, but {INDEX} {told}")
    if not problems:
        problems = [
            f"{t}: {INDEX} maps it to {f}, which does not hold it"
            for t, f in mapped.items()
            if t not in tensors and f in headers
        ]
    return tensors, problems
