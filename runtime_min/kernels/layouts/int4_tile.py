from dataclasses import dataclass
import torch
from specs.storage import int4_slot
from runtime_min.kernels.layouts.base import Int4Groups
@dataclass(frozen=True, slots=True)
class Int4Tile:
    tile_n: int
    tile_k: int
    def storage(self, shape): return (sum(int4_slot(*shape)),)
    def pack(self, w):
        n,k=w.shape
        out=torch.zeros(sum(int4_slot(n,k)),dtype=torch.int32)
        out[:n*k//8]=w.words.reshape(-1)
        out[n*k//8:n*k//8+n*k//64]=w.scales.contiguous().view(torch.int32).reshape(-1) if k>32 else w.scales.contiguous().flatten().view(torch.int32)
        return out
    def unpack(self, s, shape):
        n,k=shape
        return Int4Groups(s[:n*k//8].view(n,k//8), s[n*k//8:n*k//8+n*k//64].view(torch.bfloat16).view(n,k//32))
