"""The layouts an artifact may use. Imports without triton; device code is beside each layout."""

from collections.abc import Callable

from runtime_min.kernels.layouts.base import Int4Groups, Layout, LayoutError
from runtime_min.kernels.layouts.int4_tile import Int4Tile
from runtime_min.kernels.layouts.plain import Plain

__all__ = ["LAYOUTS", "Int4Groups", "Int4Tile", "Layout", "LayoutError", "Plain", "layout"]
LAYOUTS: dict[str, Callable[..., Layout]] = {"plain.v1": Plain, "int4_tile.v1": Int4Tile}


def layout(id: str, parameters: dict[str, int]) -> Layout:
    """The layout a manifest names."""
    if id not in LAYOUTS:
        raise LayoutError(f"unknown layout {id!r}; this version knows {', '.join(LAYOUTS)}")
    try:
        return LAYOUTS[id](**parameters)
    except TypeError as e:
        raise LayoutError(f"layout {id!r} with parameters {parameters}: {e}") from e
