"""draft: add drafts to a finished artifact; and how plan and convert show theirs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.common import AS_JSON, WORKERS, emit, workers_default

if TYPE_CHECKING:
    from convert.drafts import Draft
    from convert.pipeline import Part
    from convert.report import Report


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("drafts", nargs=-1, required=True, metavar="PATH[=NAME]...")
@WORKERS
@AS_JSON
def draft(artifact: Path, drafts: tuple[str, ...], workers: int | None, as_json: bool) -> None:
    """Add speculative drafts to the finished ARTIFACT, each as draft/NAME; nothing else in it is touched.

    PATH is the folder of an EAGLE3 or DFlash draft, a draft folder of another artifact, or a hub id; NAME is the
    folder's own unless given. The draft is cut for the artifact's mesh and bound to its digest. What keeps it from
    this target is named before anything is written; an interrupted run goes on when the same command runs again.
    """
    from convert.drafts import all_asked, finished, prepared

    ready = prepared(all_asked(drafts), finished(artifact))
    count = workers or workers_default()
    reports = write_drafts(ready, artifact, count)
    emit(as_json, reports_facts(ready, reports, count), "\n\n".join(reports_texts(ready, reports, count)))


def write_drafts(drafts: Sequence[Draft], artifact: Path, workers: int, part: Part | None = None) -> list[Report]:
    """Writes each beside its finished target."""
    from convert.drafts import warnings, write
    from convert.pipeline import job_bytes
    from convert.progress import Progress

    reports = []
    for d in drafts:
        for line in warnings(d):
            click.echo(f"warning: {line}", err=True)
        with Progress(f"draft {d.name}", sum(map(job_bytes, d.plan.jobs))) as progress:
            command = shlex.join(["kiln", *sys.argv[1:]])
            reports.append(write(d, artifact, workers, progress, command=command, part=part))
    return reports


def draft_facts(d: Draft) -> dict[str, Any]:
    """A planned draft in `kiln plan --json`."""
    return {
        "kind": d.plan.spec.name,
        "said": list(d.said),
        "tensors": len(d.plan.header),
        "source_bytes": d.plan.source_bytes,
        "rank_bytes": [d.plan.data_bytes("rank", r) for r in d.plan.ranks],
        "common_bytes": d.plan.data_bytes("common"),
        "disk_bytes": d.plan.disk_bytes,
    }


def draft_text(d: Draft) -> str:
    from convert.tables import size

    facts = draft_facts(d)
    sizes = f"{size(max(facts['rank_bytes']))} a rank of its own, {size(facts['common_bytes'])} shared"
    head = f"draft    {d.name}: {facts['tensors']} tensors, {size(facts['source_bytes'])}; {sizes}"
    return "\n".join(["", head, *(f"         {line}" for line in d.said)])


def reports_facts(drafts: Sequence[Draft], reports: Sequence[Report], workers: int) -> dict[str, Any]:
    """name -> what was written, in `kiln convert --json` and `kiln draft --json`."""
    from convert.tables import report_facts

    both = zip(drafts, reports, strict=False)
    return {d.name: {"kind": d.plan.spec.name, "said": list(d.said), **report_facts(r, workers)} for d, r in both}


def reports_texts(drafts: Sequence[Draft], reports: Sequence[Report], workers: int) -> list[str]:
    from convert.tables import report_text

    texts = []
    for d, r in zip(drafts, reports, strict=False):
        first = report_text(r, workers).partition("\n")[0]
        digests = [f"logical digest, draft {d.name}: {digest}" for digest in r.logical.values()]
        texts.append("\n".join([first, *(f"  {line}" for line in d.said), *digests]))
    return texts
