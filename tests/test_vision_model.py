"""Vision tower, projector and picture tokens against transformers' own implementation, at every mesh."""

import subprocess
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from convert.demo.geometry import TINY
from runtime_min.artifact import Artifact
from runtime_min.bench.vision import operations
from runtime_min.cli import main
from runtime_min.kernels.jit import Jit
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.models.vit import GRIDS_KEPT, Grid, Tower, VisionError
from runtime_min.ops import REF, triton_ops
from runtime_min.pictures import Pictures, PromptError, placed
from runtime_min.ranks import Ranks
from runtime_min.score import score
from runtime_min.vision.encoder import Encoder, passes, shares
from runtime_min.vision.items import Patched, clip, normalized, patches, picture, prepared
from specs.config import read_config
from specs.mesh import Mesh
from tests.fullsize import k26_config
from tests.lab import converted
from tests.pictures import RULE, drawn, saved
from tests.reference import dequantized, reference
from tests.together import together

ROOT = Path(__file__).parent.parent
BOUND = 2e-4
CPU = torch.device("cpu")
PAD = TINY.special(21)
# The learned grid is 8 x 8: equal, smaller, larger, long either way, repeated, and clips of every number of frames.
CASES: list[list[Grid]] = [
    [(1, 8, 8)],
    [(1, 2, 2), (1, 16, 10), (1, 16, 10), (1, 4, 20), (1, 8, 8), (1, 2, 40)],
    [(4, 6, 6), (3, 4, 10), (1, 2, 8), (2, 12, 4), (4, 6, 6)],
]


def pixels_of(grids: Sequence[Grid], seed: int = 0) -> Tensor:
    shape = (sum(prod(g) for g in grids), 3, 14, 14)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def prompt_for(grids: Sequence[Grid]) -> Tensor:
    """Text, then each item's tokens, with text between them: [1, T]."""
    ids, generator = [], torch.Generator().manual_seed(1)
    for _, h, w in grids:
        ids += torch.randint(0, TINY.ranks, (5,), generator=generator).tolist() + [PAD] * (h * w // 4)
    return torch.tensor([[*ids, 1, 2, 3]])


@pytest.fixture(scope="module")
def model(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return reference(dequantized(demo, tmp_path_factory.mktemp("dense") / "model"))


@pytest.fixture(scope="module")
def artifact(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vision") / "a"
    converted(demo, out)
    return out


def tower_of(path: Path, dtype: torch.dtype = torch.float32) -> Tower:
    opened = Artifact.open(path)
    assert opened.config.vision is not None
    return Tower(opened.config.vision, opened.vision(CPU, dtype), REF)


def encoder_of(path: Path, ranks: Ranks) -> Encoder:
    return Encoder(tower_of(path), RULE, ranks)


def items_of(pixels: Tensor, grids: Sequence[Grid]) -> list[Patched]:
    parts = pixels.split([prod(g) for g in grids])  # type: ignore[no-untyped-call]
    return [Patched(g, p) for g, p in zip(grids, parts, strict=True)]


def decoder_of(path: Path, ranks: Ranks) -> Decoder:
    how = Settings(dtype=torch.float32, device=CPU, positions=1024)
    return Decoder.load(Artifact.open(path, ranks.rank), REF, ranks, how)


def wanted_features(model: Any, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
    with torch.no_grad():
        return torch.cat(list(model.model.get_image_features(pixels, torch.tensor(grids)).pooler_output))


def wanted_logits(model: Any, ids: Tensor, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, pixel_values=pixels, image_grid_thw=torch.tensor(grids)).logits
    return found


@pytest.mark.parametrize("grids", CASES, ids=str)
def test_features_equal_transformers(model: Any, artifact: Path, grids: list[Grid]) -> None:
    pixels = pixels_of(grids)
    found, want = tower_of(artifact).forward(pixels, grids), wanted_features(model, pixels, grids)
    assert 0.3 < want.std() < 3
    assert (found - want).abs().max() <= BOUND


def test_an_item_is_the_same_in_any_company(artifact: Path) -> None:
    """In float64, where only the order of sums can differ: attention never leaves an item."""
    tower, grids = tower_of(artifact, torch.float64), CASES[2]
    parts = list(pixels_of(grids).double().split([prod(g) for g in grids]))
    alone = [tower.forward(p, [g]) for p, g in zip(parts, grids, strict=True)]
    assert (tower.forward(torch.cat(parts), grids) - torch.cat(alone)).abs().max() <= 1e-9
    backwards = tower.forward(torch.cat(parts[::-1]), grids[::-1])
    assert (backwards - torch.cat(alone[::-1])).abs().max() <= 1e-9
    other = tower.forward(torch.cat([parts[0], parts[1] + 1]), grids[:2])
    assert (other[: len(alone[0])] - alone[0]).abs().max() <= 1e-9


def test_the_frames_of_a_clip_are_told_apart(artifact: Path) -> None:
    tower, clip = tower_of(artifact), pixels_of([(4, 6, 6)]).view(4, 36, 3, 14, 14)
    first, second = (tower.forward(c.flatten(0, 1), [(4, 6, 6)]) for c in (clip, clip.flip(0)))
    assert (first - second).abs().max() > 1e-2


def test_position_tables_are_kept_and_bounded(artifact: Path) -> None:
    tower = tower_of(artifact)
    first = tower._place(4, 6)
    assert tower._place(4, 6) is first
    for i in range(GRIDS_KEPT):
        tower._place(2, 2 * i + 2)
    assert tower._place(4, 6) is not first and len(tower._places) == GRIDS_KEPT


@pytest.mark.parametrize(
    ("shape", "grids", "said"),
    [
        ((15, 3, 14, 14), [(1, 4, 4)], r"found \[15, 3, 14, 14\], the 1 grids want \[16, 3, 14, 14\]"),
        ((16, 3, 16, 16), [(1, 4, 4)], r"want \[16, 3, 14, 14\]"),
        (
            (12, 3, 14, 14),
            [(1, 3, 4)],
            r"grid 0: found 1 x 3 x 4 patches, expected 1..4 frames, rows in multiples of 2",
        ),
        ((20, 3, 14, 14), [(1, 2, 2), (5, 2, 2)], r"grid 1: found 5 x 2 x 2"),
        ((0, 3, 14, 14), [(1, 0, 2)], r"grid 0"),
    ],
)
def test_patches_and_grids_must_fit(artifact: Path, shape: tuple[int, ...], grids: list[Grid], said: str) -> None:
    with pytest.raises(VisionError, match=said):
        tower_of(artifact).forward(torch.zeros(shape), grids)


@pytest.mark.parametrize("grids", CASES, ids=str)
def test_logits_equal_transformers(model: Any, artifact: Path, grids: list[Grid]) -> None:
    ids, pixels = prompt_for(grids), pixels_of(grids)
    alone = Ranks(0, Mesh())
    pictures = placed(ids.flatten().tolist(), PAD, encoder_of(artifact, alone)(items_of(pixels, grids)))
    decoder, want = decoder_of(artifact, alone), wanted_logits(model, ids, pixels, grids)
    for chunk in (2048, 7):
        assert (score(decoder, ids, chunk, pictures) - want).abs().max() <= BOUND
    with torch.no_grad():
        blind = model(input_ids=ids).logits
    assert (blind - want).abs().max() > 0.1


MESHES = [
    {"world": 2, "tp": 2, "ep": 2},
    {"world": 8, "tp": 8},
    pytest.param({"world": 4, "tp": 4, "ep": 2}, marks=pytest.mark.slow),
    pytest.param({"world": 8, "tp": 8, "ep": 8}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_gives_the_same(demo: Path, tmp_path: Path, model: Any, mesh: dict[str, int]) -> None:
    """Items are shared out, so no rank encodes all of them, and every rank has every row."""
    converted(demo, tmp_path / "a", **mesh)
    grids = CASES[2]
    ids, pixels = prompt_for(grids), pixels_of(grids)
    calls: list[int] = []

    def work(ranks: Ranks) -> tuple[Tensor, Tensor]:
        encoder = encoder_of(tmp_path / "a", ranks)
        forward = encoder.tower.forward

        def counted(p: Tensor, g: Sequence[Grid]) -> Tensor:
            calls.extend(prod(x) for x in g)
            return forward(p, g)

        encoder.tower.forward = counted  # type: ignore[method-assign]
        features = encoder(items_of(pixels, grids))
        pictures = placed(ids.flatten().tolist(), PAD, features)
        return features, score(decoder_of(tmp_path / "a", ranks), ids, pictures=pictures)

    found = together(Mesh(**mesh), work)
    assert sorted(calls) == sorted(prod(g) for g in grids)
    features, logits = wanted_features(model, pixels, grids), wanted_logits(model, ids, pixels, grids)
    for rows, scores in found:
        assert (rows - features).abs().max() <= BOUND and (scores - logits).abs().max() <= BOUND


def test_files_are_encoded_alike_by_one_rank_and_by_three(artifact: Path) -> None:
    """Pictures and a clip, patches made in threads, over ranks of which one has nothing to do in the end."""
    files = [saved(drawn(w, h, w)) for w, h in ((50, 60), (130, 30), (50, 60), (28, 28))]
    items = [picture(f"p{i}", data, RULE).items[0] for i, data in enumerate(files)]
    items += clip("c", [drawn(60, 40, i) for i in range(6)], [i / 2 for i in range(6)], RULE).items
    raw = torch.cat([normalized(patches(i, 14), RULE) for i in items])
    want = tower_of(artifact).forward(raw, [i.grid for i in items])
    for world, some in ((1, items), (3, items), (3, items[:2])):
        tokens = sum(i.tokens for i in some)
        for rows in together(
            Mesh(world=world, tp=world), lambda r, some=some: encoder_of(artifact, r)(prepared(some, 14))
        ):
            assert rows.shape == (tokens, TINY.hidden) and (rows - want[:tokens]).abs().max() <= 1e-5
    assert encoder_of(artifact, Ranks(0, Mesh()))([]).shape == (0, TINY.hidden)


def test_items_are_shared_out_by_cost() -> None:
    assert shares([5, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]
    assert shares([3], 4) == [[0], [], [], []]
    assert sorted(i for s in shares([7, 3, 9, 9, 1], 3) for i in s) == [0, 1, 2, 3, 4]
    grids = [(1, 128, 128), (1, 2, 2), (1, 130, 130), (1, 128, 128), (1, 2, 2)]
    assert list(passes(grids, range(5))) == [[1, 4, 0], [3], [2]]
    assert list(passes(grids, [])) == []


def test_picture_tokens_and_features_are_counted() -> None:
    rows = torch.zeros(3, 8)
    with pytest.raises(PromptError, match=r"2 picture tokens \(id 9\), the pictures make 3"):
        placed([9, 1, 9], 9, rows)
    with pytest.raises(PromptError, match=r"1 picture tokens \(id 9\), the pictures make 0"):
        placed([9], 9, None)
    with pytest.raises(PromptError, match=r"0 picture tokens \(id None\), the pictures make 3"):
        placed([1], None, rows)
    assert placed([1, 2], 9, None) is None
    pictures = placed([9, 1, 9, 9], 9, torch.arange(3)[:, None])
    assert pictures is not None and pictures.within(1, 2) is None
    part = pictures.within(1, 4)
    assert part is not None and part[0].tolist() == [1, 2] and part[1].flatten().tolist() == [1, 2]
    assert isinstance(pictures, Pictures)


def kiln_run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime_min", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_score_takes_pixels_and_grids(demo: Path, tmp_path: Path, model: Any) -> None:
    """Through the command line, over two processes, two rows with pictures in both."""
    converted(demo, tmp_path / "a", world=2, tp=2)
    grids: list[Grid] = [(1, 4, 6), (2, 4, 4), (1, 8, 6)]
    short, long = (prompt_for(g)[0].tolist() for g in (grids[:1], grids[1:]))
    ids = torch.tensor([short + [5] * (len(long) - len(short)), long])
    pixels = pixels_of(grids)
    given = {"ids": ids, "pixels": pixels, "grids": torch.tensor(grids)}
    save_file(given, tmp_path / "in")
    where = ("--device", "cpu", "--input", tmp_path / "in", "--output", tmp_path / "out")
    done = kiln_run("score", tmp_path / "a", *where)
    assert done.returncode == 0, done.stderr
    logits = load_file(tmp_path / "out")["logits"]
    split = prod(grids[0])
    assert (logits[:1] - wanted_logits(model, ids[:1], pixels[:split], grids[:1])).abs().max() <= BOUND
    assert (logits[1:] - wanted_logits(model, ids[1:], pixels[split:], grids[1:])).abs().max() <= BOUND


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pixels": torch.zeros(23, 3, 14, 14)}, "pixels: found [23, 3, 14, 14], the 1 grids want [24, 3, 14, 14]"),
        ({"grids": torch.tensor([[1, 4, 8]])}, "the 1 grids want [32, 3, 14, 14]"),
        ({"ids": torch.tensor([[1, PAD, 2]])}, f"1 picture tokens (id {PAD}), the pictures make 6"),
        ({"pixels": torch.zeros(24, 3, 14, 14).half()}, "expected exactly `ids`"),
        ({"pixels": None}, "expected exactly `ids`"),
        ({"grids": torch.zeros(1, 2, dtype=torch.int64)}, "grids: found [1, 2], expected [N, 3]"),
    ],
)
def test_score_refuses_what_does_not_fit(artifact: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    given = {"ids": prompt_for([(1, 4, 6)]), "pixels": pixels_of([(1, 4, 6)]), "grids": torch.tensor([[1, 4, 6]])}
    save_file({n: t for n, t in (given | change).items() if t is not None}, tmp_path / "in")
    common = ("score", artifact, "--device", "cpu", "--input", tmp_path / "in", "--output", tmp_path / "out")
    result = CliRunner().invoke(main, [str(a) for a in common])
    assert result.exit_code == 1 and said in result.stderr and not (tmp_path / "out").exists()


def test_the_bench_knows_the_arithmetic() -> None:
    """The milliseconds that the release's tower takes at 805 * 10^12 operations a second."""
    vision = read_config(k26_config()).vision
    assert vision is not None
    for side, batch, ms in ((16, 1, 0.28), (64, 1, 6.92), (64, 16, 110.7), (130, 1, 62.0)):
        assert operations(vision, [(1, side, side)] * batch) / 805e9 == pytest.approx(ms, rel=0.01)


def test_the_kernels_run_the_whole_tower(artifact: Path) -> None:
    """In Triton's interpreter where there is no GPU; bf16 on the weights as stored."""
    opened, grids = Artifact.open(artifact), CASES[1][:2] + CASES[2][:1]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert opened.config.vision is not None
    pixels = pixels_of(grids).to(device)
    want = tower_of(artifact).forward(pixels.cpu(), grids)
    for dtype, bound in ((torch.float32, 2e-4), (torch.bfloat16, 6e-2)):
        weights = opened.vision(device, dtype)
        found = Tower(opened.config.vision, weights, triton_ops(Jit())).forward(pixels, grids)
        assert found.dtype == dtype and (found.cpu().float() - want).abs().max() <= bound * want.abs().max()
