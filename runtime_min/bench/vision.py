"""Milliseconds of the vision tower at full geometry: random weights made on the card, against arithmetic and
transformers' tower in the same run."""

import io
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import click
import torch
from PIL import Image
from torch import Tensor

from runtime_min.bench.report import page, write
from runtime_min.kernels.choose import chooser_here
from runtime_min.kernels.jit import Jit
from runtime_min.models.shapes import random
from runtime_min.models.vit import Grid, Tower
from runtime_min.ops import REF, Ops, triton_ops
from runtime_min.ranks import Ranks
from runtime_min.vision.encoder import Encoder, passes
from runtime_min.vision.items import picture, prepared
from runtime_min.vision.rule import Rule
from specs import manifest
from specs.config import read_config
from specs.dims import ModelConfig, VisionDims
from specs.errors import InputError
from specs.expand import expand
from specs.mesh import Mesh
from specs.schema import load

SIZES = ((224, 224), (896, 896), (1800, 1800), (4000, 3000))
BATCHES = (1, 16)
REPEATS = 5
# bf16 rounds inputs, weights and every layer's result; a table misread or a picture that sees another is far above.
BOUND = 5e-2


class BenchError(InputError):
    """What would be measured is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`batch` pictures of one size. Milliseconds of the whole batch: on the card, the first time that grid and batch
    are met, from JPEG files to embeddings, transformers' tower, and what the arithmetic alone would take."""

    width: int
    height: int
    grid: Grid
    batch: int
    ms: float
    first_ms: float
    files_ms: float
    transformers_ms: float
    floor_ms: float


def operations(d: VisionDims, grids: list[Grid]) -> float:
    """Multiplications and additions of a pass: dense products, attention, projector."""
    total = 0.0
    for grid in grids:
        n, c = prod(grid), d.vit_hidden
        layer = 2 * n * (4 * c * c + 2 * c * d.vit_ff) + 4 * n * n * c
        tokens = n // grid[0] // (d.merge_height * d.merge_width)
        total += d.vit_layers * layer + 2 * n * c * d.rgb * d.patch**2
        total += 2 * tokens * d.merged * (d.merged + d.text_hidden)
    return total


def weights_of(config: ModelConfig, device: torch.device) -> dict[str, Tensor]:
    """Random weights of the vision part that keep activations near 1; biases are zero."""
    small = replace(config, text=replace(config.text, layers=1, dense_layers=1))
    items = expand(load("kimi_k2_6"), small, {"model.embed_tokens.weight"}).items
    make, out = random(device), {}
    for item in items:
        if item.family.part == "vision":
            shape = item.family.shapes[0]
            flat = make((shape[0], prod(shape[1:])) if len(shape) > 1 else shape, torch.bfloat16)
            out[item.name] = torch.zeros_like(flat) if item.name.endswith(".bias") else flat.view(shape)
    return out


def first(work: Callable[[], object]) -> float:
    """Milliseconds of one call with the card drained before and after."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def milliseconds(work: Callable[[], object]) -> float:
    """The fastest of a few calls of `work` after one that warms up."""
    work()
    return min(first(work) for _ in range(REPEATS))


def in_passes(tower: Tower, pixels: Tensor, grid: Grid, batch: int) -> Callable[[], object]:
    """A batch of equal pictures in passes as the runtime makes them. pixels: of one picture."""
    grids = [grid] * batch
    work = [([grids[i] for i in group], pixels.repeat(len(group), 1, 1, 1)) for group in passes(grids, range(batch))]
    return lambda: [tower.forward(p, g) for g, p in work]


def jpeg(width: int, height: int) -> bytes:
    """A picture with something in it at every scale."""
    noise = Image.effect_noise((max(1, width // 8), max(1, height // 8)), 60).resize((width, height))
    out = io.BytesIO()
    Image.merge("RGB", (noise, Image.linear_gradient("L").resize((width, height)), noise)).save(out, "JPEG")
    return out.getvalue()


def theirs(d: VisionDims, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """transformers' tower and projector of this geometry in bf16 with sdpa, weights as they come."""
    from transformers import AutoConfig
    from transformers.models.kimi_k25 import modeling_kimi_k25

    vision = {
        "hidden_size": d.vit_hidden, "intermediate_size": d.vit_ff, "num_attention_heads": d.vit_heads,
        "num_hidden_layers": d.vit_layers, "pos_emb_height": d.pos_height, "pos_emb_width": d.pos_width,
        "pos_emb_time": d.pos_time, "patch_size": d.patch,
    }  # fmt: skip
    text = {"model_type": "deepseek_v3", "hidden_size": d.text_hidden}
    made: Any = AutoConfig.for_model(
        "kimi_k25", text_config=text, vision_config=vision, projection_hidden_size=d.vit_hidden
    )
    made.vision_config._attn_implementation = "sdpa"
    their: Any = modeling_kimi_k25
    with torch.device(device):
        tower = their.Kimi_K25VisionModel(made.vision_config).to(torch.bfloat16).eval()
        projector = their.Kimi_K25MultimodalProjection(made).to(torch.bfloat16).eval()

    @torch.inference_mode()
    def forward(pixels: Tensor, grids: Tensor) -> Tensor:
        found: Tensor = projector(tower(pixels, grid_thw=grids).pooler_output)
        return found

    return forward


def check(config: ModelConfig, weights: dict[str, Tensor], ops: Ops) -> None:
    """BenchError unless `ops` agree with the definitions in FP32 on pictures of several sizes."""
    assert config.vision is not None
    grids: list[Grid] = [(1, 16, 16), (1, 30, 44), (4, 8, 10)]
    pixels = torch.rand(sum(map(prod, grids)), 3, 14, 14, device="cuda") * 2 - 1
    want = Tower(config.vision, {n: w.float() for n, w in weights.items()}, REF).forward(pixels, grids)
    found = Tower(config.vision, weights, ops).forward(pixels, grids).float()
    error = float((found - want).abs().max() / want.abs().max())
    if not error <= BOUND:
        raise BenchError(f"the tower differs from its definition by {error:.2g} of the largest value, at most {BOUND}")


def table(rows: list[Row], facts: dict[str, str]) -> str:
    head = [
        "| pixels | grid | batch | ms | pictures/s | ms the first time | ms from JPEG files | transformers ms "
        "| faster | ms of arithmetic | share |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines = [
        f"| {r.width} x {r.height} | {r.grid[1]} x {r.grid[2]} | {r.batch} | {r.ms:.2f} | {1e3 * r.batch / r.ms:.1f} "
        f"| {r.first_ms:.2f} | {r.files_ms:.2f} | {r.transformers_ms:.2f} | {r.transformers_ms / r.ms:.2f} "
        f"| {r.floor_ms:.2f} | {r.floor_ms / r.ms:.2f} |"
        for r in rows
    ]
    return page("Vision tower and projector", facts, [*head, *lines])


def measured(config: ModelConfig, rule: Rule, tflops: float) -> list[Row]:
    assert config.vision is not None
    d, device = config.vision, torch.device("cuda")
    weights = weights_of(config, device)
    ours = triton_ops(Jit(chooser_here()))
    check(config, weights, ours)
    fast, reference = Tower(d, weights, ours), theirs(d, device)
    encoder = Encoder(fast, rule, Ranks(0, Mesh()))
    rows = []
    for width, height in SIZES:
        data = jpeg(width, height)
        grid = picture("bench", data, rule).items[0].grid
        pixels = torch.rand(prod(grid), 3, d.patch, d.patch, device=device, dtype=torch.bfloat16) * 2 - 1
        for batch in BATCHES:
            repeated, grids = pixels.repeat(batch, 1, 1, 1), torch.tensor([grid] * batch, device=device)

            def from_files(data: bytes = data, batch: int = batch) -> object:
                items = [i for _ in range(batch) for i in picture("bench", data, rule).items]
                return encoder(prepared(items, rule.patch))

            rows.append(
                Row(
                    width=width,
                    height=height,
                    grid=grid,
                    batch=batch,
                    first_ms=first(in_passes(fast, pixels, grid, batch)),
                    ms=milliseconds(in_passes(fast, pixels, grid, batch)),
                    files_ms=milliseconds(from_files),
                    transformers_ms=milliseconds(partial(reference, repeated, grids)),
                    floor_ms=operations(d, [grid] * batch) / tflops / 1e9,
                )
            )
            click.echo(str(rows[-1]), err=True)
    return rows


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tflops", default=805.0, help="bf16 operations that the card does at best, in 10^12 a second.")
@click.option("--result", type=click.Path(path_type=Path), default=None, help="Where to write NAME.json and NAME.md.")
def main(config: Path, tflops: float, result: Path | None) -> None:
    """Measure the vision tower that CONFIG describes: a config.json with preprocessor_config.json beside it."""
    import transformers

    model = read_config(manifest.read_json(config))
    if model.vision is None:
        raise click.UsageError(f"{config}: is of a model without a vision tower")
    found = measured(model, Rule.open(config.parent), tflops)
    facts = {
        "card": torch.cuda.get_device_name(), "layers": str(model.vision.vit_layers), "torch": torch.__version__,
        "transformers": transformers.__version__, "Python": platform.python_version(),
    }  # fmt: skip
    text = table(found, facts)
    click.echo(text)
    if result is not None:
        write(result, text, facts, [asdict(r) for r in found])


if __name__ == "__main__":
    main()
