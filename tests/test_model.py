"""The runtime against transformers' own implementation, at every mesh, in every way of feeding tokens."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from convert.demo.checkpoint import write_demo
from convert.demo.geometry import TINY, Geometry
from runtime_min.artifact import Artifact
from runtime_min.core import Core
from runtime_min.engine import Engine
from runtime_min.kv import batch
from runtime_min.models.decoder import Decoder, Settings
from runtime_min.ops import REF
from runtime_min.pages import Sequence
from runtime_min.ranks import Ranks
from runtime_min.request import Limits
from runtime_min.score import score
from tests.lab import converted
from tests.reference import dequantized, reference

ROOT = Path(__file__).parent.parent
BOUND = 2e-4
# Another head count, odd ranks, one dense layer more, experts that are no power of two.
OTHER = replace(
    TINY,
    hidden=192,
    layers=4,
    dense_layers=2,
    heads=4,
    q_lora=96,
    kv_lora=96,
    qk_nope=48,
    qk_rope=16,
    v_head=40,
    dense_ff=320,
    experts=12,
    top_k=3,
    moe_ff=128,
    shared_experts=2,
)


def ids_for(geometry: Geometry, rows: int, length: int) -> Tensor:
    return torch.randint(0, geometry.ranks, (rows, length), generator=torch.Generator().manual_seed(7))


def decoder(out: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    artifact = Artifact.open(out)
    return Decoder.load(
        artifact, REF, Ranks(0, artifact.mesh), Settings(dtype=dtype, device=torch.device("cpu"), positions=4096)
    )


@pytest.fixture(scope="module", params=["tiny", "other"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Geometry]:
    """(transformers model, artifact of world 1, geometry)."""
    geometry = TINY if request.param == "tiny" else OTHER
    folder = tmp_path_factory.mktemp(request.param)
    write_demo(folder / "model", geometry, seed=3)
    converted(folder / "model", folder / "artifact")
    return reference(dequantized(folder / "model", folder / "dense")), folder / "artifact", geometry


def test_logits_equal_transformers(pair: tuple[Any, Path, Geometry]) -> None:
    model, out, geometry = pair
    ids = ids_for(geometry, 2, 150)
    got = score(decoder(out), ids)
    with torch.no_grad():
        want = model(input_ids=ids).logits
    assert 0.5 < want.std() < 2
    assert (got - want).abs().max() <= BOUND


def test_greedy_tokens_equal_transformers(pair: tuple[Any, Path, Geometry]) -> None:
    model, out, geometry = pair
    prompt = ids_for(geometry, 1, 70)
    with torch.no_grad():
        model.generation_config.eos_token_id = None
        want = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False)[
            0, 70:
        ]
    engine = Engine.over(Core(decoder(out), Limits()))
    assert engine.generate(prompt.tolist(), max_tokens=32)[0].ids == want.tolist()


def test_decode_chunks_and_batches_equal_one_long_prefill(pair: tuple[Any, Path, Geometry]) -> None:
    """In float64, where only the order of sums can differ."""
    _, out, geometry = pair
    model = decoder(out, torch.float64)
    ids = ids_for(geometry, 3, 90)
    whole = score(model, ids)
    for chunk in (1, 7, 64, 89):
        assert (score(model, ids, chunk=chunk) - whole).abs().max() <= 1e-6
    cache, rows = model.cache(400), [Sequence() for _ in range(3)]
    lengths = [40, 3, 77]
    first = model.forward(
        batch(cache, [(s, ids[i, :n].tolist()) for i, (s, n) in enumerate(zip(rows, lengths, strict=True))]), cache
    )
    step = model.forward(batch(cache, [(rows[2], [int(ids[2, 77])]), (rows[0], ids[0, 40:60].tolist())]), cache)
    for i, n in enumerate(lengths):
        assert (first[i].float() - whole[i, n - 1]).abs().max() <= 1e-6
    assert (step[0].float() - whole[2, 77]).abs().max() <= 1e-6
    assert (step[1].float() - whole[0, 59]).abs().max() <= 1e-6


def test_inner_epsilon_is_a_parameter(pair: tuple[Any, Path, Geometry]) -> None:
    _, out, geometry = pair
    ids = ids_for(geometry, 1, 20)
    artifact = Artifact.open(out)
    how = Settings(dtype=torch.float32, device=torch.device("cpu"), positions=64, inner_eps=1e-2)
    other = Decoder.load(artifact, REF, Ranks(0, artifact.mesh), how)
    assert (score(other, ids) - score(decoder(out), ids)).abs().max() > 1e-3


MESHES = [
    {"world": 2, "tp": 2},
    {"world": 2, "tp": 2, "ep": 2},
    pytest.param({"world": 4, "tp": 4, "ep": 2}, marks=pytest.mark.slow),
    pytest.param({"world": 4, "tp": 4}, marks=pytest.mark.slow),
    pytest.param({"world": 8, "tp": 8}, marks=pytest.mark.slow),
    pytest.param({"world": 8, "tp": 8, "ep": 8}, marks=pytest.mark.slow),
    pytest.param({"world": 8, "tp": 8, "ep": 4}, marks=pytest.mark.slow),
]


def kiln_run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime_min", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def want(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A file of ids, and transformers' logits for them."""
    folder = tmp_path_factory.mktemp("want")
    ids = ids_for(TINY, 2, 70)
    save_file({"ids": ids}, folder / "in.safetensors")
    with torch.no_grad():
        return folder / "in.safetensors", reference(dequantized(demo, folder / "dense"))(input_ids=ids).logits


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_gives_the_logits_of_transformers(
    demo: Path, tmp_path: Path, want: tuple[Path, Tensor], mesh: dict[str, int]
) -> None:
    converted(demo, tmp_path / "artifact", **mesh)
    source, logits = want
    done = kiln_run(
        "score", tmp_path / "artifact", "--device", "cpu", "--input", source, "--output", tmp_path / "out.safetensors"
    )
    assert done.returncode == 0, done.stderr
    assert (load_file(tmp_path / "out.safetensors")["logits"] - logits).abs().max() <= BOUND


def test_torchrun_starts_the_ranks_too(demo: Path, tmp_path: Path, want: tuple[Path, Tensor]) -> None:
    converted(demo, tmp_path / "artifact", world=2, tp=2, ep=2)
    source, logits = want
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "-m",
        "runtime_min",
        "score",
        str(tmp_path / "artifact"),
        "--device",
        "cpu",
        "--input",
        str(source),
        "--output",
        str(tmp_path / "out.safetensors"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (load_file(tmp_path / "out.safetensors")["logits"] - logits).abs().max() <= BOUND


def test_generate_streams_and_reports(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "artifact", world=2, tp=2)
    common = ("generate", tmp_path / "artifact", "--device", "cpu", "--max-tokens", 6)
    facts = json.loads(kiln_run(*common, "--prompt", "hello", "--json").stdout)
    assert len(facts["ids"]) <= 6 and facts["finish_reason"] in ("stop", "length") and facts["prompt_tokens"] > 5
    assert kiln_run(*common, "--prompt", "hello").stdout.rstrip("\n") == facts["text"].rstrip("\n")


def test_a_seed_repeats_itself(demo: Path, tmp_path: Path) -> None:
    converted(demo, tmp_path / "artifact")
    common = ("generate", tmp_path / "artifact", "--device", "cpu", "--max-tokens", 6)
    seeded = ("--ids", "1,2,3", "--temperature", "1", "--top-p", "0.9", "--top-k", "50", "--seed", "5", "--json")
    assert kiln_run(*common, *seeded).stdout == kiln_run(*common, *seeded).stdout
