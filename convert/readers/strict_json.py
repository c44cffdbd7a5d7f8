"""JSON as the format has it: no NaN, no numbers beyond 64 bits, no name twice in one object."""

import json
import math
from typing import Any

from specs.errors import SourceError

BITS = 64
SHOWN = 120


def brief(value: object) -> str:
    """A value of a damaged file as text, short enough for an error line."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def parse_object(where: str, raw: bytes) -> dict[str, Any]:
    """The object in `raw`; SourceError says what is wrong with it."""
    try:
        parsed = json.loads(
            raw, object_pairs_hook=_unique, parse_int=_integer, parse_float=_float, parse_constant=_constant
        )
    except (ValueError, RecursionError) as e:
        raise SourceError(f"{where} is not valid JSON: {e}") from e
    if not isinstance(parsed, dict):
        raise SourceError(f"{where} is a {type(parsed).__name__}, expected an object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"{brief(name)} is there twice")
        out[name] = value
    return out


def _integer(text: str) -> int:
    value = int(text)
    if value.bit_length() >= BITS:
        raise ValueError(f"number {brief(text)} is out of range")
    return value


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number {brief(text)} is out of range")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")
