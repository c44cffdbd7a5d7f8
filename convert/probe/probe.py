"""probe: everything that can be known about a conversion before a byte of weights moves."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from convert.probe import card, checkpoint, host, kernels
from convert.probe.draft import draft_lines, is_draft, partner_lines
from convert.probe.line import Line, refusal, unasked
from convert.probe.speed import Speed, assumed, disk_speed
from convert.readers.find import find
from convert.readers.hub import HubHeaders
from convert.readers.source import Source
from convert.shard.plan import Plan, legal_values, plan
from specs.dims import ModelConfig
from specs.errors import CutError, InputError
from specs.expand import expand
from specs.mesh import Mesh
from specs.schema import archs, load
from specs.storage import nbytes

SPEC = "kimi_k2_6"
OF_SOURCE = ("config", "licence", "tokenizer")
OF_CONFIG = ("tensors",)
OF_PLAN = ("plan", "layouts", "kernels", "disk", "time", "gpu memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a conversion would be asked for. context None is the model's own; gpu_memory in GB, None is nominal.

    drafts: PATH[=NAME] each.
    """

    model: str
    mesh: Mesh
    arch: str
    out: Path
    workers: int
    context: int | None = None
    gpu_memory: float | None = None
    drafts: tuple[str, ...] = ()


def probe(q: Question) -> list[Line]:
    """One line for each thing that decides whether a conversion and its artifact will work here."""
    return [*_about_model(q), host.memory_line(q.workers), host.packages_line()]


def _about_model(q: Question) -> Iterator[Line]:
    try:
        source = find(q.model, headers_only=True)
    except InputError as e:
        yield refusal("access", e, "mend what is named; nothing was converted")
        yield from unasked((*OF_SOURCE, *OF_CONFIG, *OF_PLAN), "access")
        return
    try:
        yield checkpoint.access_line(q.model, source)
        if is_draft(source):
            yield from draft_lines(source, q.mesh)
            return
        line, config = checkpoint.config_line(source)
        yield line
        if config is None:
            yield from unasked((*OF_CONFIG, *OF_PLAN), "config")
        else:
            yield from _about_tensors(q, source, config)
        yield checkpoint.licence_line(source)
        yield checkpoint.tokenizer_line(source)
    finally:
        source.close()


def _about_tensors(q: Question, source: Source, config: ModelConfig) -> Iterator[Line]:
    total = sum(nbytes(shape, dtype) for dtype, shape in source.header.values())
    spec = load(SPEC)
    line = checkpoint.tensors_line(source, config, spec, total)
    yield line
    if line.verdict == "no-go":
        yield from unasked(OF_PLAN, "tensors")
        return
    try:
        made = plan(spec, config, source.header, q.mesh)
    except CutError as e:
        legal = legal_values(expand(spec, config, source.header), q.mesh.world)
        yield checkpoint.illegal_plan(e, legal)
        yield from unasked(OF_PLAN[1:], "plan")
        return
    yield from _about_plan(q, source, config, made)


def _about_plan(q: Question, source: Source, config: ModelConfig, made: Plan) -> Iterator[Line]:
    arch = archs()[q.arch]
    yield checkpoint.plan_line(made)
    yield kernels.layouts_line(q.arch, arch, {w.form.layout for f in made.files for w in f.work})
    yield kernels.kernels_line(q.arch, arch, None)
    cache, download = to_download(source)
    yield host.disk_line(q.out, made.disk_bytes, cache, download)
    yield host.time_line(made.source_bytes, made.disk_bytes, download, speed_of(source), q.workers)
    weights = made.data_bytes("rank") + made.data_bytes("common") + made.data_bytes("vision")
    yield card.memory_line(card.nominal(arch, q.gpu_memory), weights, config.text, q.context)
    yield from partner_lines(q.drafts, made)


def to_download(source: Source) -> tuple[Path | None, int]:
    """The hub's cache folder, and the bytes of weights that are not in it yet."""
    if not isinstance(source, HubHeaders):
        return None, 0
    from huggingface_hub import constants, try_to_load_from_cache

    repo, commit = str(source.identity.repo), source.identity.revision
    weights = {n: s for n, s in source.files.items() if n.endswith(".safetensors")}
    missing = [n for n in weights if not isinstance(try_to_load_from_cache(repo, n, revision=commit), str)]
    return Path(constants.HF_HUB_CACHE), sum(weights[n] for n in missing)


def speed_of(source: Source) -> Speed:
    """Of the disk that holds the source's files, as far as they are here."""
    if isinstance(source, HubHeaders):
        return assumed("disk not measured: the weights are on the hub")
    return disk_speed(source.path.rglob("*.safetensors"))
