"""README.md of an artifact: what it is and how to use and check it. The same source and plan give the same text."""

import re
from collections.abc import Mapping

from convert.readers.source import Identity
from convert.shard.plan import Plan

NAME = "README.md"


def card(plan: Plan, identity: Identity, logical: Mapping[str, str], beside: Mapping[str, bytes]) -> str:
    """The model card, with the metadata that the hub reads. beside: name -> bytes of the files taken along."""
    revision = f" at `{identity.revision}`" if identity.revision else ""
    source = f"`{identity.repo}`{revision}" if identity.repo else "a local checkpoint"
    mesh = plan.mesh
    part = "" if plan.whole else f" This is a part of it: ranks {', '.join(map(str, plan.ranks))}."
    text = plan.data_bytes("rank", plan.ranks[0]), plan.data_bytes("common"), sum(f.size for f in plan.files)
    return "\n".join(
        [
            *front_matter(plan, identity, logical, beside),
            "",
            f"# A Kiln artifact for {mesh.world} ranks",
            "",
            f"Made from {source}, {len(plan.header):,} tensors. Bytes were moved, no value was changed. The licence of",
            f"the weights lies beside this file.{part}",
            "",
            "| world | tensor parallel | expert parallel | bytes a rank | shared by all ranks | bytes in all |",
            "|--:|--:|--:|--:|--:|--:|",
            f"| {mesh.world} | {mesh.tp} | {mesh.ep} | " + " | ".join(f"{n:,}" for n in text) + " |",
            "",
            "`kiln fetch REPO --rank 0 --arch sm90 --out DIR` takes what one rank needs, `kiln-run generate DIR` runs",
            "all ranks. Folders in `kernels` are compiled for one GPU architecture each; the weights serve all.",
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


def front_matter(plan: Plan, identity: Identity, logical: Mapping[str, str], beside: Mapping[str, bytes]) -> list[str]:
    """YAML for the hub. The licence is called what the first line of its own text says."""
    mesh = plan.mesh
    layouts = sorted({w.form.layout for f in plan.files for w in f.work} - {"plain.v1"})
    tags = ["kiln", plan.spec.family, "pre-sharded", "int4", f"tp{mesh.tp}", f"ep{mesh.ep}", *layouts]
    licence = next((n for n in sorted(beside) if n.upper().startswith(("LICENSE", "LICENCE"))), None)
    return [
        "---",
        *([f"base_model: {identity.repo}", "base_model_relation: quantized"] if identity.repo else []),
        "library_name: kiln",
        f"pipeline_tag: {'image-text-to-text' if 'vision' in logical else 'text-generation'}",
        *(["license: other", f"license_name: {title(beside[licence])}", f"license_link: {licence}"] if licence else []),
        f"tags: [{', '.join(tags)}]",
        "---",
    ]


def title(licence: bytes) -> str:
    """`Modified MIT License` -> `modified-mit`."""
    lines = (line.strip() for line in licence.decode(errors="replace").splitlines())
    words = re.findall(r"[a-z0-9.]+", next(filter(None, lines), "").lower())
    return "-".join(w for w in words if w not in ("the", "license", "licence")) or "other"
