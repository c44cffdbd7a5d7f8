"""MoonViT-3D and the projector: patches of pictures and short clips, packed, to rows of the text embedding."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import gelu, interpolate, layer_norm, linear

from runtime_min.kernels.wide import wide
from runtime_min.ops import Ops
from runtime_min.runs import runs
from specs.dims import VisionDims
from specs.errors import InputError

# Fixed by the architecture; config.json does not state them.
NORM_EPS = 1e-5
THETA = 10000.0
# Grids whose position tables are kept: a screenful of sizes, at most some 50 MB each at full width.
GRIDS_KEPT = 16
Grid = tuple[int, int, int]


class VisionError(InputError):
    """Patches and grids that do not fit each other or this tower."""


@dataclass(frozen=True, slots=True)
class Places:
    """Position tables of one grid's frame: learned [h w, C], cos and sin [h w, D / 2] by row and column."""

    learned: Tensor
    cos: Tensor
    sin: Tensor


class Tower:
    """Vision tower and projector, whole on every rank. `forward` encodes any number of items in one pass."""

    def __init__(self, dims: VisionDims, weights: dict[str, Tensor], ops: Ops) -> None:
        self.dims, self.ops, self.w = dims, ops, weights
        self.patch = weights["patch_embed.weight"].flatten(1)
        self.head = dims.vit_hidden // dims.vit_heads
        self._places: OrderedDict[tuple[int, int], Places] = OrderedDict()

    @property
    def device(self) -> torch.device:
        return self.patch.device

    @property
    def dtype(self) -> torch.dtype:
        return self.patch.dtype

    def tokens(self, grid: Grid) -> int:
        """Rows of the text embedding that an item becomes: one for each merged square, whatever its frames."""
        return grid[1] * grid[2] // (self.dims.merge_height * self.dims.merge_width)

    @torch.inference_mode()
    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """pixels [P, 3, p, p], normalized, items in order and frames, rows, columns within them -> [tokens, hidden].

        grids: (frames, rows, columns) of every item, in patches. Raises VisionError if they do not add up to P.
        """
        self.check(pixels, grids)
        learned, cos, sin = self._positions(grids)
        lengths = tuple(prod(g) for g in grids)
        x = linear(pixels.flatten(1).to(self.patch.dtype), self.patch, self.w["patch_embed.bias"]) + learned
        for b in range(self.dims.vit_layers):
            x = self._block(x, f"blocks.{b}.", cos, sin, lengths)
        return self._projected(self._merged(self._norm(x, "final_norm"), grids))

    def _block(self, x: Tensor, at: str, cos: Tensor, sin: Tensor, lengths: tuple[int, ...]) -> Tensor:
        w = self.w
        qkv = linear(self._norm(x, f"{at}norm0"), w[f"{at}wqkv.weight"], w[f"{at}wqkv.bias"])
        seen = self.ops.vit_attn(qkv.view(len(x), 3, self.dims.vit_heads, self.head), cos, sin, lengths)
        x = x + linear(seen.flatten(1), w[f"{at}wo.weight"], w[f"{at}wo.bias"])
        wide_ = linear(self._norm(x, f"{at}norm1"), w[f"{at}fc0.weight"], w[f"{at}fc0.bias"])
        return x + linear(gelu(wide_, approximate="tanh"), w[f"{at}fc1.weight"], w[f"{at}fc1.bias"])

    def _norm(self, x: Tensor, name: str, eps: float = NORM_EPS) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)

    def _merged(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """x [P, C] -> [tokens, squares, C]: the mean over frames, then the patches of each merged square together."""
        mh, mw, width = self.dims.merge_height, self.dims.merge_width, x.shape[1]
        out = []
        for start, count, (t, h, w) in runs(grids, prod):
            frames = x[start : start + count * t * h * w].view(count, t, h // mh, mh, w // mw, mw, width)
            still = frames[:, 0] if t == 1 else frames.to(wide(x)).mean(1).to(x.dtype)
            out.append(still.transpose(2, 3).reshape(-1, mh * mw, width))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _projected(self, x: Tensor) -> Tensor:
        w = self.w
        joined = self._norm(x, "projector.norm", self.dims.projector_eps).flatten(1)
        inner = gelu(linear(joined, w["projector.fc0.weight"], w["projector.fc0.bias"]))
        return linear(inner, w["projector.fc1.weight"], w["projector.fc1.bias"])

    def _positions(self, grids: Sequence[Grid]) -> tuple[Tensor, Tensor, Tensor]:
        """Learned and temporal positions [P, C] in the weights' dtype, cos and sin [P, D / 2]."""
        learned, cos, sin = [], [], []
        for _, count, (t, h, w) in runs(grids, prod):
            place = self._place(h, w)
            frames = place.learned[None]
            if t > 1:
                frames = frames + self._times(t)[:, None]
            learned.append(frames.to(self.patch.dtype).repeat(count, 1, 1).flatten(0, 1))
            cos.append(place.cos.repeat(count * t, 1))
            sin.append(place.sin.repeat(count * t, 1))
        return torch.cat(learned), torch.cat(cos), torch.cat(sin)

    def _place(self, h: int, w: int) -> Places:
        """The tables of an h x w frame, made once while it is among the last GRIDS_KEPT."""
        found = self._places.pop((h, w), None) or self._made(h, w)
        self._places[h, w] = found
        if len(self._places) > GRIDS_KEPT:
            self._places.popitem(last=False)
        return found

    def _made(self, h: int, w: int) -> Places:
        """Source: Kimi-VL technical report (2-D rotary beside a resampled learned grid); pairs alternate x and y."""
        table = self.w["pos_emb"].to(wide(self.patch))
        if table.shape[:2] != (h, w):
            # [y, x, C] -> [1, C, y, x] and back.
            table = interpolate(table.permute(2, 0, 1)[None], (h, w), mode="bicubic")[0].permute(1, 2, 0)
        frequencies = THETA ** (-torch.arange(0, self.head, 4, dtype=torch.float64) / self.head)
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        angles = torch.stack([x, y], -1).flatten(0, 1)[:, None] * frequencies[:, None]  # [h w, D / 4, 2]
        angles = angles.flatten(1).to(self.device)
        dtype = wide(self.patch)
        return Places(table.flatten(0, 1).contiguous(), angles.cos().to(dtype), angles.sin().to(dtype))

    def _times(self, frames: int) -> Tensor:
        """Sines, then cosines, of the frame's number: [t, C]."""
        width = self.dims.vit_hidden
        w = THETA ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(frames)[:, None] * w
        return torch.cat([angles.sin(), angles.cos()], -1).to(self.device, wide(self.patch))

    def check(self, pixels: Tensor, grids: Sequence[Grid]) -> None:
        """VisionError for grids that this tower cannot take, or that want another number of patches."""
        d = self.dims
        for i, (t, h, w) in enumerate(grids):
            if not (1 <= t <= d.pos_time and h > 0 and w > 0 and h % d.merge_height == w % d.merge_width == 0):
                raise VisionError(
                    f"grid {i}: found {t} x {h} x {w} patches, expected 1..{d.pos_time} frames, rows in multiples of "
                    f"{d.merge_height} and columns of {d.merge_width}"
                )
        wanted = (sum(prod(g) for g in grids), d.rgb, d.patch, d.patch)
        if tuple(pixels.shape) != wanted:
            raise VisionError(f"pixels: found {list(pixels.shape)}, the {len(grids)} grids want {list(wanted)}")
