from runtime_min.kernels.layouts.base import Int4Groups, LayoutError
from runtime_min.kernels.layouts.int4_tile import Int4Tile
from runtime_min.kernels.layouts.plain import Plain
def layout(id, parameters):
    return {"plain.v1": Plain, "int4_tile.v1": Int4Tile}[id](**parameters)
