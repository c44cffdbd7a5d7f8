"""Launches that overlap: every program waits before it touches memory that others write, and launchers ask for it."""

import ast
import ctypes
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime_min.aside import Aside
from runtime_min.kernels import cubin, jit
from runtime_min.kernels.choose import chooser
from runtime_min.kernels.compile import recorded
from runtime_min.kernels.index import HERE, Compiled, KernelError
from runtime_min.kernels.jit import Jit
from runtime_min.kernels.launch import Kernels, Launch
from runtime_min.kernels.linear import launch as linear
from runtime_min.kernels.linear.launch import Config
from runtime_min.kernels.mla_decode.launch import RINGS
from runtime_min.kernels.race import captured
from runtime_min.kernels.record import Variant, variant
from runtime_min.kernels.rmsnorm.launch import rmsnorm
from runtime_min.models.shapes import of_dims
from specs.config import read_config
from specs.mesh import Mesh
from specs.schema import archs
from tests.fullsize import k26_config

ROOT = Path(__file__).parent.parent
WAIT, NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
LAUNCHED = re.compile(r'kernel="(\w+)\.(\w+)"')
# In a file of its own, with a test of its own.
GLUON = ("mla_decode", "streamed")
# Kernels that the quick test compiles, one variant of each.
FEW = ("linear.product", "mla_decode.combine", "moe_int4.add_up", "moe_route.choose", "rmsnorm.rows")


def launched() -> list[tuple[str, str]]:
    """(op, function) of every kernel in Triton that some op launches."""
    return sorted({m for path in HERE.glob("*/launch.py") for m in LAUNCHED.findall(path.read_text())} - {GLUON})


def called(node: ast.AST) -> set[str]:
    """Names of functions and methods that are called in a node."""
    calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else f.id for f in calls if isinstance(f, ast.Attribute | ast.Name)}


@pytest.mark.parametrize(("op", "name"), launched(), ids=map(".".join, launched()))
def test_every_kernel_is_ready_before_it_does_anything(op: str, name: str) -> None:
    tree = ast.parse((HERE / op / "kernel.py").read_text())
    (body,) = (n.body for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    place = next(i for i, s in enumerate(body) if isinstance(s, ast.Expr) and called(s) == {"ready"})
    assert not set().union(*map(called, body[:place]))
    assert not any(isinstance(n, ast.Return) for s in body[:place] for n in ast.walk(s))
    assert sum("ready" in called(s) for s in body) == 1


def test_all_kernels_are_looked_at() -> None:
    assert len(launched()) >= 15 and {op for op, _ in launched()} == {p.parent.name for p in HERE.glob("*/kernel.py")}


def opcodes(ptx: str) -> Iterator[str]:
    """The instructions of a kernel in the order of the text, without predicates and operands."""
    for statement in re.split(r"[;{}\n]", ptx[ptx.index(".entry") :]):
        words = statement.split("//")[0].split()
        words = words[1:] if words and words[0].startswith("@") else words
        if words and words[0][0] not in ".$)/":
            yield words[0]


def touches(opcode: str) -> bool:
    """Does it read or write memory that other kernels may see? Generic addresses count."""
    parts = opcode.split(".")
    if parts[0] == "cp":
        return opcode not in ("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")
    own = any(p.split("::")[0] in ("param", "shared", "local") for p in parts) and "global" not in parts
    return parts[0] in ("ld", "ldu", "st", "atom", "red", "multimem") and not own


def wrong(kernel: Variant, arch: str, ptx: str) -> str:
    """What a kernel does not do as it must, empty if it does all."""
    found = list(opcodes(ptx))
    if archs()[arch]["target"] < 90:
        early = [o for o in found if o.startswith("griddepcontrol")]
        return f"has {early}" if early else ""
    if (found.count(WAIT), found.count(NEXT)) != (1, 1) or found.index(NEXT) < found.index(WAIT):
        return f"waits {found.count(WAIT)} times and lets the next begin {found.count(NEXT)} times"
    head, rest = found[: found.index(WAIT)], found[found.index(WAIT) :]
    early = [o for o in head if touches(o) or o.split(".")[0] in ("bra", "ret", "exit", "call", "brx")]
    if early:
        return f"does {early} before it waits"
    return "" if any(map(touches, rest)) else "touches nothing at all: the reader of instructions sees too little"


TRANSLATE = """
import sys, pickle
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from runtime_min.kernels.compile import translated

def ptx(variant, arch):
    return translated(variant, arch).asm["ptx"]

if __name__ == "__main__":
    wanted = pickle.loads(sys.stdin.buffer.read())
    with ProcessPoolExecutor(2) as pool:
        sys.stdout.buffer.write(pickle.dumps(list(pool.map(partial(ptx, arch=sys.argv[1]), wanted))))
"""


def translations(wanted: list[Variant], arch: str, folder: Path) -> list[str]:
    """PTX of kernels, from processes in which Triton is a compiler."""
    script = folder / "translate.py"
    script.write_text(TRANSLATE)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script, arch], env=env, input=pickle.dumps(wanted), capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(pickle.loads(done.stdout))


def variants(arch: str, *meshes: Mesh) -> list[Variant]:
    """What two layers of the release launch; pictures by the library, by our kernel and by default."""
    config = read_config(k26_config())
    found: dict[Variant, None] = {}
    default = chooser(arch)
    for mesh in meshes:
        dims = replace(config.text, layers=2)
        meta = of_dims(dims, mesh, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"), torch.bfloat16)
        library, own = (lambda p, i=i: p.candidates()[i] if p.op == "vit_attn" else default(p) for i in (0, -1))
        for choose in (default, library, own):
            found |= recorded(dims, mesh, meta, torch.bfloat16, choose, config.vision).variants
    return list(found)


@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_some_kernels_wait_before_they_touch_memory(arch: str, tmp_path: Path) -> None:
    found = variants(arch, Mesh(world=8, tp=8))
    few = [next(v for v in found if v.kernel == name) for name in FEW]
    few += [next(v for v in found if ("ACROSS", True) in v.constants)]
    said = {v.kernel: wrong(v, arch, p) for v, p in zip(few, translations(few, arch, tmp_path), strict=True)}
    assert not any(said.values()), said


@pytest.mark.parametrize("block", list(RINGS))
def test_the_kernel_in_gluon_waits_first_and_releases_nothing_early(block: int, tmp_path: Path) -> None:
    """Its other warps branch off before the wait, to where the first ones send them to work after it."""
    types = ("*bf16",) * 3 + ("*i32",) * 3 + ("*fp32",) * 2 + ("i32", "i32", "fp32", "i32", "*i32", "*i32")
    constants = {"H": 8, "L": 512, "R": 64, "P": 64, "BLOCK": block, "ALONE": False, "TREE": False}
    key = Variant(".".join(GLUON), types, tuple(sorted({**constants, "SLOTS": RINGS[block]}.items())), 4, 2)
    (ptx,) = translations([key], "sm90", tmp_path)
    found = list(opcodes(ptx))
    assert (found.count(WAIT), found.count(NEXT)) == (1, 0)
    head, rest = found[: found.index(WAIT)], found[found.index(WAIT) :]
    assert sum(o.split(".")[0] in ("bra", "brx") for o in head) <= 1
    assert not [o for o in head if touches(o) or o.split(".")[0] in ("ret", "exit", "call")]
    assert any(map(touches, rest))


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(archs()))
def test_all_kernels_wait_before_they_touch_memory(arch: str, tmp_path: Path) -> None:
    every = variants(arch, Mesh(world=8, tp=8), Mesh(world=8, tp=8, ep=8))
    assert {v.kernel for v in every} == set(map(".".join, launched()))
    said = [(v.kernel, wrong(v, arch, p)) for v, p in zip(every, translations(every, arch, tmp_path), strict=True)]
    assert not any(text for _, text in said), [s for s in said if s[1]]


def test_what_comes_too_early_is_seen() -> None:
    kernel = Variant("rmsnorm.rows", (), (), 4, 2)
    head = ".entry k (\n.param .u64 p\n)\n{\n.reg .b64 %r;\nld.param.b64 %r, [p];\n"
    good = f"{head}{WAIT};\n{NEXT};\n@%p ld.global.b32 x;\n}}\n"
    assert wrong(kernel, "sm90", good) == ""
    assert wrong(kernel, "sm80", good) == f"has ['{WAIT}', '{NEXT}']"
    for early in ("ld.global.b32 a", "@%p st.b32 [a]", "{ cp.async.cg.shared.global [a]", "ret", "@%p bra $L"):
        assert "before it waits" in wrong(kernel, "sm90", good.replace(WAIT, f"{early};\n{WAIT}"))
    assert "waits 0 times" in wrong(kernel, "sm90", good.replace(WAIT, "mov.b32 a"))
    assert "touches nothing" in wrong(kernel, "sm90", good.replace("ld.global", "ld.shared"))


class Watched:
    """Stands in for libcuda: remembers launches."""

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def function(self, image: bytes, symbol: str, shared: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(3)

    def __call__(self, name: str, config: Any, handle: ctypes.c_void_p, addresses: Any, extra: None) -> None:
        assert name == "cuLaunchKernelEx" and handle.value == 3
        self.launches.append(config._obj)


@pytest.mark.parametrize(
    ("overlap", "able", "wanted", "count"),
    [(True, True, True, 1), (False, True, True, 0), (True, False, True, 0), (True, True, False, 0)],
)
def test_the_driver_is_told(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, able: bool, wanted: bool, count: int
) -> None:
    monkeypatch.setattr(cubin, "Driver", Watched)
    monkeypatch.setattr(cubin, "overlaps_here", lambda: able)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    loaded, x = cubin.Loaded(overlap), torch.zeros(64)
    launch = Launch(kernel="rmsnorm.rows", grid=(5, 6, 7), args=(x, 3, 0.5), constants={}, warps=2, overlap=wanted)
    key = variant(launch)
    loaded.add(Compiled(variant=key, file="", symbol="s", shared_bytes=96, scratch=(0, 0), threads=192, sha256=""), b"")
    loaded.run(launch, key)
    (config,) = loaded.driver.launches  # type: ignore[attr-defined]
    assert (list(config.grid), list(config.block)) == ([5, 6, 7], [192, 1, 1])
    assert (config.shared, config.stream, config.count) == (96, 77, count)
    if count:
        attribute = config.attributes[0]
        assert (attribute.id, attribute.value) == (6, 1)


def test_structures_lie_as_the_driver_reads_them() -> None:
    """Sizes and offsets of cuda.h on 64 bits."""
    a, c = cubin.Attribute, cubin.Config
    assert (ctypes.sizeof(a), a.value.offset, ctypes.sizeof(c)) == (72, 8, 56)
    assert (c.block.offset, c.shared.offset, c.stream.offset, c.attributes.offset, c.count.offset) == (
        12,
        24,
        32,
        40,
        48,
    )


@pytest.mark.parametrize(("overlap", "able", "told"), [(True, True, True), (False, True, False), (True, False, False)])
def test_triton_is_told(monkeypatch: pytest.MonkeyPatch, overlap: bool, able: bool, told: bool) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(jit, "overlaps_here", lambda: able)
    monkeypatch.setattr(jit, "function", lambda kernel: {(2, 1, 1): lambda *args, **given: seen.append(given)})
    x = torch.zeros(2, 8)
    rmsnorm(Jit(overlap=overlap), x, x[0], 1e-6)
    assert seen[0].get("launch_pdl", False) is told and seen[0]["num_warps"] >= 1


def test_work_aside_has_scratch_of_its_own_and_a_graph_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    first, same, other = (linear.scratch(cpu, aside, 8, 2) for aside in (False, False, True))
    assert first[1] is same[1] and first[1].data_ptr() != other[1].data_ptr() and not other[1].any()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match="run the work once before its capture"):
        linear.scratch(torch.device("cuda"), False, 8, 2)


def chain(kernels: Kernels, x: torch.Tensor, weights: list[torch.Tensor], gamma: torch.Tensor) -> torch.Tensor:
    """Launches that each need the one before, in as little time as can be."""
    for weight in weights:
        x = rmsnorm(kernels, linear.linear(kernels, x, weight), gamma, 1e-6)
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("config", [Config(bn=16, bk=128, warps=2), Config(bn=32, bk=128, split=4, warps=2)], ids=str)
def test_dependent_launches_see_each_other_s_results(config: Config) -> None:
    """Overlapped or not, on one stream or two, launched or replayed: the same bits."""
    x, gamma = torch.randn(2, 1, 2048, device="cuda").bfloat16(), torch.ones(2048, device="cuda").bfloat16()
    weights = [torch.randn(2048, 2048, device="cuda").bfloat16() for _ in range(100)]
    plain, early = (Jit(lambda p: config, overlap) for overlap in (False, True))
    want = [chain(plain, row, weights, gamma) for row in x]
    torch.cuda.synchronize()
    assert all(torch.equal(chain(early, row, weights, gamma), w) for row, w in zip(x, want, strict=True))
    found = [torch.empty_like(want[0]) for _ in want]

    def both() -> None:
        aside = Aside(x[0])
        with aside:
            found[0].copy_(chain(early, x[0], weights, gamma))
        found[1].copy_(chain(early, x[1], weights, gamma))
        aside.join()

    both()
    graph = captured(both)
    for _ in range(20):
        for f in found:
            f.zero_()
        graph.replay()
        assert all(torch.equal(f, w) for f, w in zip(found, want, strict=True))
