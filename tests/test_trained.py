"""The trained model that ships with the package: that it arrives, converts for every mesh, and stays as good as it was.

Expected figures are those of its card, which benchmarks/trained.py writes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from convert.demo import shipped
from runtime_min.artifact import Artifact
from runtime_min.bench.quality import answers, bits_per_byte, question
from runtime_min.core import Core
from runtime_min.engine import Engine
from runtime_min.kernels.jit import Jit
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.ops import REF, Ops, triton_ops
from runtime_min.ranks import Ranks
from runtime_min.request import Limits
from runtime_min.text import Tokenizer
from specs.mesh import Mesh
from tests.lab import converted
from tests.together import together
from tests.trained import SAMPLE, digit_answers, digit_pictures

CPU = torch.device("cpu")
# Sums of float32 in another order, over some thousand tokens.
EQUAL = 1e-5
# Rounding to bf16 of weights' products and of activations.
BF16 = 0.01
MOST_BITS = 1.5
LEAST_DIGITS = 0.95
MESHES = [
    Mesh(world=8, tp=8, ep=1),
    Mesh(world=2, tp=2, ep=2),
    *(
        pytest.param(Mesh(world=w, tp=t, ep=e), marks=pytest.mark.slow)
        for w, t, e in ((1, 1, 1), (2, 2, 1), (4, 4, 1), (4, 4, 2), (4, 4, 4), (8, 8, 2), (8, 8, 4), (8, 8, 8))
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "model"
    shipped.write_shipped(out)
    return out


@pytest.fixture(scope="module")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "artifact"
    converted(model, out)
    return out


@pytest.fixture(scope="module")
def card() -> dict[str, Any]:
    found: dict[str, Any] = shipped.facts("card")
    return found


def texts() -> list[str]:
    return [d["text"] for d in shipped.facts("heldout")["text"]]


def decoder(
    path: Path, ranks: Ranks, dtype: torch.dtype = torch.float32, device: torch.device = CPU, ops: Ops = REF
) -> Decoder:
    artifact = Artifact.open(path, ranks.rank) if ranks.mesh.world > 1 else Artifact.open(path)
    return Decoder.load(artifact, ops, ranks, Settings(dtype=dtype, device=device, positions=2048))


def test_all_of_it_is_at_most_sixteen_megabytes(model: Path) -> None:
    files = [p for folder in (model, shipped.drafts_of(model)) for p in folder.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 16_000_000
    assert {p.parent.name for p in files} == {"model", *shipped.DRAFTS}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bits_per_byte_are_the_cards_at_every_mesh(
    model: Path, card: dict[str, Any], tmp_path: Path, mesh: Mesh
) -> None:
    converted(model, tmp_path / "a", world=mesh.world, tp=mesh.tp, ep=mesh.ep)
    tokenizer, sample = Tokenizer.open(tmp_path / "a"), texts()[:SAMPLE]
    found = together(mesh, lambda ranks: bits_per_byte(decoder(tmp_path / "a", ranks), tokenizer, sample))
    assert len(set(found)) == 1 and abs(found[0] - card["bits_per_byte_sample"]) <= EQUAL


@pytest.mark.slow
def test_held_out_text_is_as_likely_as_the_card_says(artifact: Path, card: dict[str, Any]) -> None:
    found = bits_per_byte(decoder(artifact, Ranks(0, Mesh())), Tokenizer.open(artifact), texts())
    assert abs(found - card["bits_per_byte"]) <= EQUAL


def test_the_card_meets_the_bar(card: dict[str, Any]) -> None:
    assert card["bits_per_byte"] <= MOST_BITS and card["digit_accuracy"] >= LEAST_DIGITS
    assert sum(a["ends"] for a in card["prompts"].values()) >= 8 and len(card["prompts"]) == 10
    assert len(card["pinned"]) == 10 and all(a["gap"] > 1e-3 for a in card["pinned"].values())


def test_greedy_answers_are_pinned(artifact: Path, card: dict[str, Any]) -> None:
    """In float64, token by token; and no answer hangs on a near tie."""
    opened, tokenizer = Artifact.open(artifact), Tokenizer.open(artifact)
    core = Core(decoder(artifact, Ranks(0, Mesh()), torch.float64), Limits(cache_tokens=8192))
    with Engine.over(core) as engine:
        said = answers(engine, tokenizer, [question(opened, tokenizer, p) for p in card["pinned"]])
    assert [a.ids for a in said] == [a["ids"] for a in card["pinned"].values()]
    assert all(a.gap > 1e-3 for a in said)


def test_listed_prompts_end_by_themselves(artifact: Path, card: dict[str, Any]) -> None:
    opened, tokenizer = Artifact.open(artifact), Tokenizer.open(artifact)
    asked = [question(opened, tokenizer, p) for p in card["prompts"]]
    with Engine(artifact, Limits(cache_tokens=8192), device="cpu", dtype="float32") as engine:
        assert sum(a.ends for a in answers(engine, tokenizer, asked)) >= 8


@pytest.mark.parametrize("count", [24, pytest.param(None, marks=pytest.mark.slow)])
def test_held_out_digits_are_named(artifact: Path, card: dict[str, Any], count: int | None) -> None:
    right = digit_answers(artifact, digit_pictures()[:count])
    assert sum(right) / len(right) >= (LEAST_DIGITS - 0.1 if count else card["digit_accuracy"] - 0.005)


@pytest.mark.gpu
def test_bf16_on_a_gpu_is_as_good(artifact: Path, card: dict[str, Any]) -> None:
    device = torch.device("cuda")
    model = decoder(artifact, Ranks(0, Mesh()), torch.bfloat16, device, triton_ops(Jit()))
    found = bits_per_byte(model, Tokenizer.open(artifact), texts())
    assert abs(found - card["bits_per_byte"]) <= BF16
