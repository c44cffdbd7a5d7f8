"""A rank's engine with all that an artifact brings for it, and what it says of itself at the start."""

import torch

from runtime_min.artifact import Artifact
from runtime_min.core import Constrain, Core
from runtime_min.kernels.choose import tables_here
from runtime_min.kernels.cubin import Cubins
from runtime_min.models.decoder import Decoder
from runtime_min.request import Limits
from runtime_min.text import Tokenizer
from runtime_min.vision.encoder import Encoder


def assembled(model: Decoder, artifact: Artifact, limits: Limits) -> Core:
    """The engine of a rank that serves: it sees if the artifact has a vision part."""
    encode = Encoder.load(artifact, model.ops, model.ranks, model.settings) if artifact.has_vision else None
    return Core(model, limits, encode, _constrain(artifact) if limits.grammars else None)


def _constrain(artifact: Artifact) -> Constrain:
    """Places in grammars over the tokens of an artifact."""
    from runtime_min.grammar import Constraint, vocabulary

    known = vocabulary(Tokenizer.open(artifact.path))
    return lambda compiled: Constraint(compiled, known)


def about(core: Core, artifact: Artifact) -> tuple[str, ...]:
    """Lines for the start: machine, mesh, who computes what, memory."""
    model, mesh, d = core.model, core.ranks.mesh, core.model.dims
    device = model.settings.device
    here = f"{torch.get_num_threads()} threads" if device.type == "cpu" else _card(device)
    limits = core.limits
    graphs = core.runner.graphs
    captured = f"up to {limits.graphs} tokens" if graphs is not None else "none"
    lines = [
        f"device: {device.type}, {here}; torch {torch.__version__}, {_triton()}",
        f"mesh: {mesh.world} ranks, TP {mesh.tp}, EP {mesh.ep}; a rank has {d.experts // mesh.ep} experts of width "
        f"{d.moe_ff // mesh.etp} and {d.heads // mesh.tp} heads",
        f"compute: {_kernels(core)}, {str(model.settings.dtype).removeprefix('torch.')}; pictures: "
        f"{'yes' if core.encode is not None else 'no vision part'}; drafts: none",
        f"tuning: {_tuning(core, artifact)}",
        f"steps: {limits.running} requests, {limits.step_tokens} tokens; graphs: {captured}",
    ]
    cache = f"cache: {core.bounds.cache_tokens} tokens a group; context: {core.bounds.context} tokens"
    return (*lines, cache, *(() if core.memory is None else (core.memory.line(),)))


def _card(device: torch.device) -> str:
    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"{name} (sm{major}{minor}), CUDA {torch.version.cuda}, NCCL {nccl}"


def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"Triton {version('triton')}"
    except PackageNotFoundError:
        return "no Triton"


def _kernels(core: Core) -> str:
    """Who computes experts, prefill and decode, and why."""
    kernels = core.model.ops.kernels
    if kernels is None:
        return "reference ops for experts, prefill and decode (the default on a CPU, or asked for)"
    if isinstance(kernels, Cubins):
        return f"Triton kernels compiled ahead of time for experts, prefill and decode (kernels/{kernels.arch})"
    return "Triton kernels for experts, prefill and decode, compiled at first use"


def _tuning(core: Core, artifact: Artifact) -> str:
    """The tables that configs come from."""
    if core.model.ops.kernels is None:
        return "none is needed"
    if core.model.settings.device.type != "cuda":
        return "none on a CPU"
    found = tables_here(artifact.path, str(artifact.manifest["digest"]))
    return ", ".join(f"{t.setting.device} {t.digest[:12]}" for t in found) or "no table for this card, default configs"
