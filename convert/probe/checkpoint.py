"""What a model is, from its headers alone: reachable, complete, of this family, cut by the mesh, licensed."""

import fnmatch
import re
from collections.abc import Mapping
from pathlib import Path

from convert.probe.line import Line, refusal
from convert.readers.hub import HubHeaders
from convert.readers.source import LICENCE_GLOBS, TOKENIZER_FILES, Source
from convert.shard.plan import Plan
from convert.tables import size
from specs.config import read_config
from specs.dims import ModelConfig
from specs.draft import DraftConfig
from specs.errors import InputError
from specs.expand import check_header, expand
from specs.limits import check_sizes
from specs.mesh import Mesh, spell
from specs.schema import Spec

README = "README.md"
LICENCE_FIELD = re.compile(r"^(license|license_name): *[\"']?([^\"'\n]+)[\"']?$", re.MULTILINE)


def access_line(model: str, source: Source) -> Line:
    """Where the headers came from, and how much was read for them."""
    identity = source.identity
    if isinstance(source, HubHeaders):
        found = (
            f"{identity.repo}@{identity.revision}: your token reaches it; {size(source.fetched)} of headers read, "
            "no weights"
        )
    elif source.logical is not None:
        found = f"{model}: an artifact, sealed; its tensors are a source"
    else:
        found = f"{model}: a checkpoint folder"
    facts = {"repo": identity.repo, "revision": identity.revision}
    if isinstance(source, HubHeaders):
        facts["header_bytes"] = str(source.fetched)
    return Line(name="access", verdict="go", found=found, facts=facts)


def config_line(source: Source) -> tuple[Line, ModelConfig | None]:
    """config.json: a model of this family, and the fields that nobody knows."""
    try:
        config = read_config(source.config)
        check_sizes(config, len(source.header))
    except InputError as e:
        return refusal("config", e, "this kiln converts Kimi K2 models with INT4 experts in groups of 32 only"), None
    t = config.text
    found = (
        f"{t.layers} layers ({t.dense_layers} dense), {t.experts} experts top {t.top_k}, hidden {t.hidden}, "
        f"vision {'yes' if config.vision else 'no'}, context {t.context:,}"
    )
    facts = {"layers": t.layers, "experts": t.experts, "context": t.context, "warnings": list(config.warnings)}
    if config.warnings:
        found += "; " + "; ".join(config.warnings[:3])
        return Line(name="config", verdict="warn", found=found, do="check that field", facts=facts), config
    return Line(name="config", verdict="go", found=found, facts=facts), config


def tensors_line(source: Source, config: ModelConfig | DraftConfig, spec: Spec, total: int) -> Line:
    """Every tensor's name, dtype and shape against the spec; their values are checked while converting."""
    try:
        expanded = expand(spec, config, source.header)
        check_header(expanded, source.header)
    except InputError as e:
        return refusal("tensors", e, "download the checkpoint again, or name another revision")
    found = f"{len(source.header):,} tensors, {size(total)}: all that spec {spec.name} names, and no others"
    facts = {"tensors": len(source.header), "bytes": total, "dropped": dict(expanded.dropped)}
    if expanded.dropped:
        found = f"{found} but {len(expanded.dropped)} left out on purpose"
    return Line(name="tensors", verdict="go", found=found, facts=facts)


def plan_line(plan: Plan) -> Line:
    """What each rank gets; a mesh that converts but cannot be run yet is a warning."""
    mesh, once = plan.mesh, plan.data_bytes("common") + plan.data_bytes("vision")
    ranks = [plan.data_bytes("rank", r) for r in range(mesh.world)]
    found = f"{mesh}: {size(max(ranks))} a rank of its own, {size(once)} shared; largest file "
    found += size(max(f.size for f in plan.files))
    facts = {"rank_bytes": ranks, "shared_bytes": once, "disk_bytes": plan.disk_bytes}
    return mesh_line("plan", mesh, found, facts)


def mesh_line(name: str, mesh: Mesh, found: str, facts: Mapping[str, object]) -> Line:
    """A legal mesh; serving groups (tp below world) convert but do not run yet."""
    if mesh.tp < mesh.world:
        return Line(
            name=name,
            verdict="warn",
            found=f"{found}; tp {mesh.tp} below world {mesh.world} cannot be run yet",
            do=f"use --tp {mesh.world} to run it",
            facts=dict(facts),
        )
    return Line(name=name, verdict="go", found=found, facts=dict(facts))


def illegal_plan(error: InputError, legal: Mapping[str, list[int]]) -> Line:
    """A mesh that does not divide the model, with what does."""
    return refusal("plan", error, f"legal --tp: {spell(legal['tp'])}; --ep with this world: {spell(legal['ep'])}")


def names_of(source: Source) -> list[str]:
    """The files beside the weights."""
    if isinstance(source, HubHeaders):
        return sorted(source.files)
    return sorted(p.name for p in source.path.iterdir() if p.is_file())


def text_of(source: Source, name: str) -> str:
    path = source.small(name) if isinstance(source, HubHeaders) else source.path / name
    return Path(path).read_text(encoding="utf-8", errors="replace")


def licence_line(source: Source) -> Line:
    """The LICENSE file, and what the README's front matter names."""
    names = names_of(source)
    files = [n for n in names if any(fnmatch.fnmatch(n, glob) for glob in LICENCE_GLOBS)]
    said = dict(LICENCE_FIELD.findall(text_of(source, README).partition("\n---\n")[0])) if README in names else {}
    named = said.get("license_name", said.get("license"))
    facts = {"files": files, "named": named}
    if files:
        first = next((line.strip() for line in text_of(source, files[0]).splitlines() if line.strip()), "empty")
        also = f"; {README} names {named}" if named else ""
        found = f"{', '.join(files)} ({first[:60]}){also}; goes along byte for byte"
        return Line(name="licence", verdict="go", found=found, facts=facts)
    found = f"no LICENSE file; {README} names {named}" if named else "no LICENSE file, and no README names one"
    do = "put the release's LICENSE beside the weights; without it the artifact must not be published"
    return Line(name="licence", verdict="warn", found=found, do=do, facts=facts)


def tokenizer_line(source: Source) -> Line:
    """Whether text can go in and out."""
    names = names_of(source)
    found = [n for n in (*TOKENIZER_FILES, "tokenizer_config.json", "chat_template.jinja") if n in names]
    if any(n in found for n in TOKENIZER_FILES):
        return Line(name="tokenizer", verdict="go", found=", ".join(found), facts={"files": found})
    return Line(
        name="tokenizer",
        verdict="warn",
        found=f"no {' or '.join(TOKENIZER_FILES)}",
        do="put the tokenizer beside the weights; without it the artifact runs on token ids only",
        facts={"files": found},
    )
