"""The vision tower and projector for training: still pictures of one size, in a batch."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import gelu, interpolate, layer_norm, linear, scaled_dot_product_attention

from convert.demo.geometry import Geometry
from convert.demo.training.params import Params

EPS = 1e-5
THETA = 10000.0
STACKED = ("norm0", "norm1", "wqkv", "wo", "fc0", "fc1")


def units(patches: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 patches [..., 3, p, p] -> [..., 3 p p] in -1..1, the preprocessor's units."""
    return ((patches.float() / 255 - 0.5) / 0.5).flatten(-3).to(dtype)


@lru_cache(16)
def turns(side: int, head: int, device: torch.device) -> Tensor:
    """[side * side, head / 2] complex: neighbouring pairs turn by column and by row, one after the other."""
    steps = THETA ** (-torch.arange(0, head, 4, dtype=torch.float64) / head)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = (torch.stack([x, y], -1).flatten(0, 1)[:, None] * steps[:, None]).flatten(1)
    return torch.polar(torch.ones_like(angles), angles).to(device, torch.complex64)


def tower(g: Geometry, w: Params, patches: Tensor) -> Tensor:
    """patches [n, side * side, 3, p, p] uint8 -> rows of the text embedding [n, tokens, hidden]."""
    w = {name.removeprefix("vit."): t for name, t in w.items() if name.startswith("vit.")}
    layers = {name: t.unbind(0) for name, t in w.items() if name.startswith(STACKED)}
    n, count = patches.shape[:2]
    side, dtype = round(count**0.5), w["patch"].dtype

    def normed(x: Tensor, name: str, block: int | None = None) -> Tensor:
        weight, bias = (w[n] if block is None else layers[n][block] for n in (name, f"{name}_bias"))
        return layer_norm(x.float(), weight.shape, weight.float(), bias.float(), EPS).to(dtype)

    def dense(x: Tensor, name: str, block: int) -> Tensor:
        return linear(x, layers[name][block], layers[f"{name}_bias"][block])

    places = interpolate(w["pos"].float().permute(2, 0, 1)[None], (side, side), mode="bicubic", align_corners=False)
    x = linear(units(patches, dtype), w["patch"], w["patch_bias"]).float() + places[0].flatten(1).T
    table = turns(side, g.vit_hidden // g.vit_heads, x.device)
    for b in range(g.vit_layers):
        qkv = dense(normed(x, "norm0", b), "wqkv", b).view(n, count, 3, g.vit_heads, -1)
        q, k = (_turned(t, table).transpose(1, 2).to(dtype) for t in qkv[:, :, :2].unbind(2))
        seen = scaled_dot_product_attention(q, k, qkv[:, :, 2].transpose(1, 2))
        x = x + dense(seen.transpose(1, 2).flatten(2), "wo", b)
        x = x + dense(gelu(dense(normed(x, "norm1", b), "fc0", b), approximate="tanh"), "fc1", b)
    x = normed(normed(x, "final_norm"), "projector_norm")
    half_h, half_w = side // g.merge_height, side // g.merge_width
    squares = x.view(n, half_h, g.merge_height, half_w, g.merge_width, -1).transpose(2, 3).reshape(n, -1, g.merged)
    return linear(gelu(linear(squares, w["proj0"], w["proj0_bias"])), w["proj2"], w["proj2_bias"])


def _turned(x: Tensor, table: Tensor) -> Tensor:
    """x [n, patches, heads, D], its pairs of neighbours turned by `table` [patches, D / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table[:, None]).flatten(-2)
