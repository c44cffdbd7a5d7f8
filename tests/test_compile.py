"""Kernels ahead of time: what is compiled, that it is reproducible, and that what does not fit is refused by name."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime_min.artifact import Artifact
from runtime_min.kernels import cubin, index, tuning
from runtime_min.kernels.cases import vision_cases
from runtime_min.kernels.choose import chooser
from runtime_min.kernels.compile import recorded, see, translated
from runtime_min.kernels.index import KernelError
from runtime_min.kernels.launch import Launch
from runtime_min.kernels.record import Recorder, Variant
from runtime_min.kernels.rmsnorm.launch import rmsnorm
from runtime_min.models.shapes import of_artifact, of_dims
from runtime_min.ops import triton_ops
from specs import manifest
from specs.config import read_config
from specs.mesh import Mesh
from specs.schema import archs
from tests.fullsize import k26_config
from tests.lab import converted, copied

ROOT = Path(__file__).parent.parent
BF16 = torch.bfloat16
Body = dict[str, Any]


def compiled(artifact: Path, arch: str, cache: Path) -> str:
    """Compiles in a process of its own, where Triton is a compiler and its cache is empty."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "runtime_min", "compile", str(artifact), "--arch", arch]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def artifact(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compile")
    converted(demo, folder / "artifact", world=8, tp=8)
    assert "sm90: " in compiled(folder / "artifact", "sm90", folder / "cache")
    return folder / "artifact"


def digest_of(artifact: Path) -> str:
    return str(manifest.read(artifact)["digest"])


def test_every_kernel_of_the_model_is_there(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    shapes = of_artifact(opened, BF16)
    wanted = recorded(opened.config.text, opened.mesh, shapes, BF16, chooser("sm90"), opened.config.vision).variants
    found = index.read(artifact, "sm90", digest_of(artifact))
    assert set(found) == set(wanted) and len(found) > 30
    assert {v.kernel.split(".")[0] for v in found} == {
        "linear", "mla_decode", "mla_prefill", "moe_int4", "moe_route", "rmsnorm", "rope_cache", "silu_mul",
        "vit_attn",
    }  # fmt: skip
    shipped = [t.path.name for t in tuning.tables("sm90")]
    own = tuning.tables("sm90", artifact, digest_of(artifact))[: len(shipped)]
    assert shipped and [t.path for t in own] == [artifact / "tuning" / n for n in shipped]
    assert json.loads((artifact / "kernels/sm90/index.json").read_text())["tried"] == ["H200"]
    limit = archs()["sm90"]["shared_bytes"]
    for kernel in found.values():
        assert kernel.shared_bytes <= limit and index.image(artifact, "sm90", kernel)[:4] == b"\x7fELF"


def test_two_builds_in_two_folders_are_byte_equal(artifact: Path, tmp_path: Path) -> None:
    other = copied(artifact, tmp_path / "elsewhere" / "b")
    shutil.rmtree(other / "kernels")
    compiled(other, "sm90", tmp_path / "cache")
    first, second = (
        {p.name: p.read_bytes() for p in sorted((a / "kernels/sm90").iterdir())} for a in (artifact, other)
    )
    assert first == second
    assert not any(str(ROOT).encode() in data for data in second.values())
    assert "already there" in compiled(other, "sm90", tmp_path / "cache")


@pytest.mark.parametrize(
    "arch", ["sm120", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm80", "sm100", "sm103"))]
)
def test_other_architectures_compile_within_their_shared_memory(artifact: Path, tmp_path: Path, arch: str) -> None:
    other = copied(artifact, tmp_path / "a")
    compiled(other, arch, tmp_path / "cache")
    found = index.read(other, arch, digest_of(other))
    assert max(k.shared_bytes for k in found.values()) <= archs()[arch]["shared_bytes"]


@pytest.mark.parametrize("mesh", [Mesh(world=8, tp=8), Mesh(world=8, tp=8, ep=8)], ids=str)
def test_the_release_s_kernels_are_few(mesh: Mesh) -> None:
    """No token count, context or page table makes a kernel of its own."""
    config = read_config(k26_config())
    dims = config.text
    meta = of_dims(dims, mesh, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), BF16)
    found = recorded(dims, mesh, meta, BF16, chooser("sm90"), config.vision)
    assert 40 < len(found.variants) < 90


def test_what_is_tuned_of_the_vision_tower_is_what_it_asks_for() -> None:
    config = read_config(k26_config())
    assert config.vision is not None
    recorder = Recorder(lambda problem: problem.candidates()[-1])
    see(config.vision, triton_ops(recorder), BF16)
    timed = vision_cases(config.vision, torch.device("meta"))
    assert [c.problem for c in timed] == list(recorder.problems)
    names = [v.kernel for v in recorder.variants]
    assert sorted(names) == ["vit_attn.attend", "vit_attn.pack"]


COMPILE = """
import sys, pickle
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from runtime_min.kernels.compile import compiled
if __name__ == "__main__":
    wanted = pickle.loads(sys.stdin.buffer.read())
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        print(max(k.shared_bytes for k, _ in pool.map(partial(compiled, arch="sm90"), wanted)))
"""


@pytest.mark.parametrize("ep", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_what_the_shipped_table_chooses_compiles(tmp_path: Path, ep: int) -> None:
    """Every default and tuned config of the release's TP 8 rank, within the shared memory of a block."""
    dims = read_config(k26_config()).text
    mesh = Mesh(world=8, tp=8, ep=ep)
    meta = of_dims(dims, mesh, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), BF16)
    wanted: dict[Variant, None] = {}
    for tables in ((), tuning.tables("sm90")):
        wanted |= recorded(dims, mesh, meta, BF16, chooser("sm90", tables)).variants
    script = tmp_path / "compile_all.py"
    script.write_text(COMPILE)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, env=env, input=pickle.dumps(list(wanted)), capture_output=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 < int(done.stdout) <= archs()["sm90"]["shared_bytes"]


def altered(artifact: Path, out: Path, change: Callable[[Body], object], seal: bool = True) -> Path:
    """A copy whose index was changed, and sealed again if wanted."""
    other = copied(artifact, out)
    path = other / "kernels/sm90/index.json"
    body = json.loads(path.read_text())
    body.pop("digest")
    change(body)
    digest = hashlib.sha256(manifest.canonical(body)).hexdigest() if seal else "0"
    path.write_bytes(manifest.canonical({**body, "digest": digest}))
    return other


@pytest.mark.parametrize(
    ("change", "seal", "said"),
    [
        (lambda b: b.update(arch="sm80"), True, "compiled for sm80, this is sm90"),
        (lambda b: b.update(weights="0" * 64), True, "compiled for an artifact of another digest"),
        (lambda b: b["sources"].update(rmsnorm="0" * 64), True, "rmsnorm: compiled from other device code"),
        (lambda b: b["sources"].update(gone="0" * 64), True, "gone: compiled from other device code"),
        (lambda b: b["kernels"].pop(), False, "was changed after sealing"),
        (lambda b: b.update(version=99), True, "is no kiln-kernels index of version 1"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    artifact: Path, tmp_path: Path, change: Callable[[Body], object], seal: bool, said: str
) -> None:
    other = altered(artifact, tmp_path / "a", change, seal)
    with pytest.raises(KernelError, match=said) as caught:
        index.read(other, "sm90", digest_of(other))
    assert f"run `kiln-run compile {other} --arch sm90`" in str(caught.value)


def test_a_flipped_byte_in_a_cubin_is_refused(artifact: Path, tmp_path: Path) -> None:
    other = copied(artifact, tmp_path / "a")
    kernel = next(iter(index.read(other, "sm90", digest_of(other)).values()))
    path = other / "kernels/sm90" / kernel.file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(KernelError, match=rf"{kernel.file}: is not the file that was sealed; run `kiln-run compile"):
        index.image(other, "sm90", kernel)
    path.unlink()
    with pytest.raises(KernelError, match="cannot be read"):
        index.image(other, "sm90", kernel)


class NoDriver:
    """Stands in for libcuda where there is none: loads anything, launches nothing."""

    def function(self, image: bytes, symbol: str, shared: int) -> int:
        return len(image)


def test_kernels_of_one_generation_are_refused_for_others() -> None:
    types = ("*bf16",) * 3 + ("*i32",) * 3 + ("*fp32",) * 2 + ("i32", "i32", "fp32", "i32", "*i32", "*i32")
    constants = {"H": 8, "L": 512, "R": 64, "P": 64, "BLOCK": 16, "ALONE": False, "TREE": False, "SLOTS": 5}
    key = Variant("mla_decode.streamed", types, tuple(constants.items()), 4, 2)
    for arch in archs():
        if arch != "sm90":
            with pytest.raises(KernelError, match=f"mla_decode.streamed: is written for sm90, not for {arch}"):
                translated(key, arch)


def test_what_was_not_compiled_is_named_when_it_is_wanted(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "Driver", NoDriver)
    kernels = cubin.Cubins(artifact, "sm90", digest_of(artifact), chooser("sm90"))
    assert kernels.digest == manifest.read_json(artifact / "kernels/sm90/index.json")["digest"]
    x = torch.zeros(2, 256, dtype=BF16)
    odd = Launch(kernel="rmsnorm.rows", grid=(2, 1, 1), args=(x, x, x, x, x, 1e-6, 256), constants={"H": 255}, warps=3)
    with pytest.raises(KernelError, match=r"kernels/sm90: has no rmsnorm.rows for .*'H': 255.*3 warps; run `kiln-run"):
        kernels.run(odd)


def test_pointers_off_16_bytes_are_refused(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "Driver", NoDriver)
    kernels = cubin.Cubins(artifact, "sm90", digest_of(artifact), chooser("sm90"))
    hidden = Artifact.open(artifact, verify=False).config.text.hidden
    x = torch.zeros(3 * hidden, dtype=BF16)[1 : 1 + 2 * hidden].view(2, hidden)
    with pytest.raises(KernelError, match=rf"rmsnorm.rows: a bf16 tensor of shape \[2, {hidden}\] is not on 16 bytes"):
        rmsnorm(kernels, x, torch.zeros(hidden, dtype=BF16), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(archs()))
def test_the_release_s_kernels_fit_every_architecture(arch: str, tmp_path: Path) -> None:
    """And archs.yaml says how much of a block's shared memory they take, by the Triton that this was written with."""
    dims = read_config(k26_config()).text
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script), arch], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and dims.layers == 61, done.stderr[-3000:]
    facts = archs()[arch]
    assert int(done.stdout) == facts["kernel_bytes"] <= facts["shared_bytes"]


SHARED = """
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from runtime_min.kernels.choose import chooser
from runtime_min.kernels.compile import compiled, recorded
from runtime_min.models.shapes import of_dims
from specs.config import read_config
from specs.mesh import Mesh
from tests.fullsize import k26_config

if __name__ == "__main__":
    config = read_config(k26_config())
    dims = replace(config.text, layers=2)
    wanted = {}
    for mesh in (Mesh(world=8, tp=8), Mesh(world=8, tp=8, ep=8)):
        meta = of_dims(dims, mesh, lambda s, t: torch.empty(s, dtype=t, device="meta"), torch.bfloat16)
        wanted |= recorded(dims, mesh, meta, torch.bfloat16, chooser(sys.argv[1]), config.vision).variants
    with ProcessPoolExecutor(2) as pool:
        print(max(k.shared_bytes for k, _ in pool.map(partial(compiled, arch=sys.argv[1]), wanted)))
"""
