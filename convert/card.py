"""README.md of an artifact: what it is and how to check it. The same source and plan give the same text."""

from collections.abc import Mapping

from convert.readers.source import Identity
from convert.shard.plan import Plan

NAME = "README.md"


def card(plan: Plan, identity: Identity, logical: Mapping[str, str]) -> str:
    """The model card, with the metadata that the hub reads."""
    base = [f"base_model: {identity.repo}", "base_model_relation: quantized"] if identity.repo else []
    revision = f" at `{identity.revision}`" if identity.revision else ""
    source = f"`{identity.repo}`{revision}" if identity.repo else "a local checkpoint"
    mesh = plan.mesh
    return "\n".join(
        [
            "---",
            *base,
            "library_name: kiln",
            f"tags: [kiln, {plan.spec.family}, int4, tp{mesh.tp}, ep{mesh.ep}]",
            "---",
            "",
            f"# A Kiln artifact for {mesh.world} ranks",
            "",
            f"Made from {source}, {len(plan.header):,} tensors. Its licence lies beside this file.",
            "",
            "| world | tensor parallel | expert parallel | bytes in all |",
            "|--:|--:|--:|--:|",
            f"| {mesh.world} | {mesh.tp} | {mesh.ep} | {sum(f.size for f in plan.files):,} |",
            "",
            "Logical digests, equal for every artifact of the same checkpoint whatever its mesh:",
            "",
            *(f"- {part}: `{digest}`" for part, digest in sorted(logical.items())),
            "",
            "Check every byte and recompute these digests with `kiln verify DIR`; compare every element with a",
            "checkpoint by `kiln verify DIR --against MODEL`; cut it for another mesh by `kiln convert DIR --tp N`.",
            "",
        ]
    )
