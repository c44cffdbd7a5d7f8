"""kernels/<arch>/index.json: what was compiled for an artifact, sealed on its own and bound to the weights."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from runtime_min.kernels.record import Variant
from specs import manifest
from specs.errors import InputError
from specs.schema import archs

FORMAT = "kiln-kernels"
VERSION = 1
NAME = "index.json"
HERE = Path(__file__).parent
SHARED_SOURCES = ("compat.py", "layouts/int4_tile_device.py")


class KernelError(InputError):
    """A compiled kernel is missing, altered, of another architecture, version or artifact, or gives wrong results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One cubin. scratch: bytes a block of global and of profile scratch. threads: of a block, with those of warps that
    the kernel adds by itself."""

    variant: Variant
    file: str
    symbol: str
    shared_bytes: int
    scratch: tuple[int, int]
    threads: int
    sha256: str


def folder(artifact: Path, arch: str) -> Path:
    return artifact / "kernels" / arch


def rebuild(artifact: Path, arch: str) -> str:
    """What to do about kernels that do not fit."""
    return f"run `kiln-run compile {artifact} --arch {arch}`"


@cache
def source_digest(op: str) -> str:
    """sha256 over the device code of one op and of what every op uses."""
    digest = hashlib.sha256()
    own = [HERE / op / "kernel.py", *sorted((HERE / op).glob("*_device.py"))]
    for path in (*own, *(HERE / name for name in SHARED_SOURCES)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def sealed(arch: str, weights: str, triton: str, kernels: list[Compiled]) -> bytes:
    """index.json: the same kernels give the same bytes. `tried` names the cards that kernels of the architecture have
    run on."""
    ops = sorted({k.variant.kernel.split(".")[0] for k in kernels})
    body = {
        "format": FORMAT, "version": VERSION, "arch": arch, "tried": archs()[arch]["tried"], "weights": weights,
        "triton": triton,
        "sources": {op: source_digest(op) for op in ops},
        "kernels": [_row(k) for k in sorted(kernels, key=lambda k: k.file)],
    }  # fmt: skip
    return manifest.seal(body)


def _row(k: Compiled) -> dict[str, Any]:
    v = k.variant
    return {
        "kernel": v.kernel, "file": k.file, "symbol": k.symbol, "types": list(v.types), "constants": dict(v.constants),
        "warps": v.warps, "stages": v.stages, "registers": v.registers, "shared_bytes": k.shared_bytes, 
        "scratch": list(k.scratch), "threads": k.threads, "sha256": k.sha256,
    }  # fmt: skip


def read(artifact: Path, arch: str, weights: str) -> dict[Variant, Compiled]:
    """The compiled kernels of an artifact for one architecture; KernelError with all that is wrong with them.

    `weights` is the digest of the artifact's manifest. The cubins themselves are checked when they are loaded.
    """
    path = folder(artifact, arch) / NAME
    found = manifest.read_json(path)
    problems = []
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise KernelError(f"{path}: is no {FORMAT} index of version {VERSION}; {rebuild(artifact, arch)}")
    if not manifest.intact(found):
        raise KernelError(f"{path}: was changed after sealing; {rebuild(artifact, arch)}")
    if found["arch"] != arch:
        problems.append(f"compiled for {found['arch']}, this is {arch}")
    if found["weights"] != weights:
        problems.append("compiled for an artifact of another digest")
    stale = [op for op, digest in found["sources"].items() if not same_source(op, digest)]
    problems += [f"{op}: compiled from other device code than is installed" for op in stale]
    if problems:
        raise KernelError([f"{path}: {p}; {rebuild(artifact, arch)}" for p in problems])
    compiled = [_compiled(row) for row in found["kernels"]]
    return {k.variant: k for k in compiled}


def same_source(op: str, digest: str) -> bool:
    return (HERE / op / "kernel.py").is_file() and source_digest(op) == digest


def _compiled(row: Mapping[str, Any]) -> Compiled:
    constants = tuple(sorted(row["constants"].items()))
    return Compiled(
        # Indexes that were written before there was a choice have no such field.
        variant=Variant(
            row["kernel"], tuple(row["types"]), constants, row["warps"], row["stages"], row.get("registers", 0)
        ),
        file=row["file"], symbol=row["symbol"], shared_bytes=row["shared_bytes"],
        scratch=(row["scratch"][0], row["scratch"][1]), threads=row.get("threads", 32 * row["warps"]),
        sha256=row["sha256"],
    )  # fmt: skip


def image(artifact: Path, arch: str, kernel: Compiled) -> bytes:
    """The cubin; KernelError if its file is missing or altered."""
    path = folder(artifact, arch) / kernel.file
    try:
        data = path.read_bytes()
    except OSError as e:
        raise KernelError(f"{path}: cannot be read: {e.strerror}; {rebuild(artifact, arch)}") from e
    if hashlib.sha256(data).hexdigest() != kernel.sha256:
        raise KernelError(f"{path}: is not the file that was sealed; {rebuild(artifact, arch)}")
    return data
