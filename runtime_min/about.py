"""What an engine says of itself at the start: machine, mesh, who computes what."""

import re
from pathlib import Path

import torch

from runtime_min.artifact import Artifact
from runtime_min.core import Core
from runtime_min.kernels.choose import tables_here
from runtime_min.kernels.cubin import Cubins

DRIVER = Path("/proc/driver/nvidia/version")
VERSION = re.compile(r"\b\d+(\.\d+)+\b")


def about(core: Core, artifact: Artifact) -> tuple[str, ...]:
    """Lines for the start; memory, cache and graphs the engine tells by itself."""
    model, mesh, d = core.model, core.ranks.mesh, core.model.dims
    device = model.settings.device
    here = f"{torch.get_num_threads()} threads" if device.type == "cpu" else _card(device)
    return (
        f"device: {device.type}, {here}; torch {torch.__version__}, {_triton()}",
        f"mesh: {mesh.world} ranks, TP {mesh.tp}, EP {mesh.ep}; a rank has {d.experts // mesh.ep} experts of width "
        f"{d.moe_ff // mesh.etp} and {d.heads // mesh.tp} heads; sums between ranks: {core.ranks.sums}",
        f"compute: {_kernels(core)}, {str(model.settings.dtype).removeprefix('torch.')}",
        f"pictures: {_pictures(core)}; drafts: {_drafts(core)}",
        f"tuning: {_tuning(core, artifact)}",
    )


def _drafts(core: Core) -> str:
    """Which draft proposes, and how much."""
    pace, limits = core.pace, core.limits
    if pace is None:
        return "none"
    tree = f" in trees of {pace.nodes}" if pace.nodes else ""
    return f"{limits.draft}, up to {pace.tokens} tokens in a row{tree}{', adaptive' if pace.adaptive else ''}"


def _card(device: torch.device) -> str:
    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"{name} (sm{major}{minor}), driver {driver()}, CUDA {torch.version.cuda}, NCCL {nccl}"


def driver() -> str:
    """The version of the kernel module, which alone knows it without a further library."""
    try:
        found = VERSION.search(DRIVER.read_text())
    except OSError:
        return "unknown"
    return found.group() if found else "unknown"


def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"Triton {version('triton')}"
    except PackageNotFoundError:
        return "no Triton"


def _kernels(core: Core) -> str:
    """Who computes the text, and why."""
    kernels, roles = core.model.ops.kernels, "experts, prefill, decode and verify"
    if kernels is None:
        return f"reference ops for {roles} (the default on a CPU, or asked for)"
    if isinstance(kernels, Cubins):
        return f"Triton kernels compiled ahead of time for {roles} (kernels/{kernels.arch})"
    return f"Triton kernels for {roles}, compiled at first use (the artifact has none for this device and dtype)"


def _pictures(core: Core) -> str:
    """Who computes the attention of the vision tower, and why."""
    if not core.bounds.sees:
        return "no vision part"
    if core.model.ops.kernels is None:
        return "reference ops"
    return "a Triton kernel for positions, torch's attention (cuDNN's where it takes these heads, being the fastest)"


def _tuning(core: Core, artifact: Artifact) -> str:
    """The tables that configs come from."""
    if core.model.ops.kernels is None:
        return "none is needed"
    if core.model.settings.device.type != "cuda":
        return "none on a CPU"
    found = tables_here(artifact.path, str(artifact.manifest["digest"]))
    return ", ".join(f"{t.setting.device} {t.digest[:12]}" for t in found) or "no table for this card, default configs"
