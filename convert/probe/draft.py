"""What a draft is and which target it fits, from its headers alone."""

from collections.abc import Iterator, Sequence

from convert.drafts import Target, all_asked, prepared
from convert.probe.checkpoint import licence_line, tensors_line
from convert.probe.line import Line, refusal, unasked
from convert.readers.source import Source
from convert.shard.plan import legal_values, plan
from convert.tables import size
from specs.draft import KINDS, DraftConfig, read_draft_config
from specs.errors import InputError
from specs.expand import expand
from specs.mesh import Mesh, spell
from specs.schema import load
from specs.storage import nbytes


def is_draft(source: Source) -> bool:
    names = source.config.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]) in KINDS


def draft_lines(source: Source, mesh: Mesh) -> Iterator[Line]:
    """A draft by itself: readable, complete, for which target, cut by the mesh, licensed."""
    try:
        config = read_draft_config(source.config)
    except InputError as e:
        yield refusal("config", e, "this kiln converts EAGLE3 and DFlash drafts of Kimi K2 models only")
        yield from unasked(("tensors", "target", "plan"), "config")
        return
    facts = {"kind": config.kind, "taps": list(config.taps), "warnings": list(config.warnings)}
    found = "; ".join([f"{config.kind}: {config.taps_said}", *config.warnings])
    yield Line(name="config", verdict="go", found=found, facts=facts)
    line = tensors_line(source, config, load(config.kind), sum(nbytes(s, d) for d, s in source.header.values()))
    yield line
    yield target_line(config)
    if line.verdict == "no-go":
        yield from unasked(("plan",), "tensors")
    else:
        yield plan_line(source, config, mesh)
    yield licence_line(source)


def target_line(config: DraftConfig) -> Line:
    """What a target must be like; whether a given one is, `kiln probe MODEL --draft` tells."""
    least = config.target_layers or config.taps[-1] + 1
    layers = f"{least} layers" if config.target_layers is not None else f"{least} layers or more"
    found = f"fits a target of hidden size {config.target_hidden}, {config.embed_vocab:,} tokens, {layers}"
    facts = {"hidden": config.target_hidden, "vocab": config.embed_vocab, "layers": config.target_layers}
    return Line(name="target", verdict="go", found=found, facts=facts)


def plan_line(source: Source, config: DraftConfig, mesh: Mesh) -> Line:
    """What each rank would get of it."""
    spec = load(config.kind)
    try:
        made = plan(spec, config, source.header, mesh)
    except InputError as e:
        legal = legal_values(expand(spec, config, source.header), mesh.world)
        return refusal("plan", e, f"legal --tp: {spell(legal['tp'])}")
    own, shared = made.data_bytes("rank"), made.data_bytes("common")
    facts = {"rank_bytes": own, "shared_bytes": shared, "disk_bytes": made.disk_bytes}
    found = f"{mesh}: {size(own)} a rank of its own, {size(shared)} shared"
    return Line(name="plan", verdict="go", found=found, facts=facts)


def partner_lines(drafts: Sequence[str], target: Target) -> Iterator[Line]:
    """Each draft beside the target that it is asked for."""
    for a in all_asked(drafts):
        try:
            (ready,) = prepared([a], target, headers_only=True)
        except InputError as e:
            yield refusal("draft", e, "choose the draft of this model, or leave it out")
            continue
        facts = {"name": a.name, "said": list(ready.said), "disk_bytes": ready.plan.disk_bytes}
        yield Line(name="draft", verdict="go", found=f"{a.name}: {'; '.join(ready.said)}", facts=facts)
