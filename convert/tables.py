"""What the command line shows: plain text tables, and the same facts as JSON."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.readers.sealed import drafts
from convert.report import Report, peak_memory
from convert.shard.plan import Plan, legal_values
from specs import manifest
from specs.dims import ModelConfig
from specs.mesh import spell


def size(n: float) -> str:
    """Bytes as people read them, decimal units."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(len(str(int(n))) - 1, 12) // 3
    return f"{n / 1000**power:.{2 if power else 0}f} {units[power]}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left column left, the others right-aligned; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def families(plan: Plan) -> list[dict[str, Any]]:
    """Bytes by family of tensors: over all ranks together, on one rank, and whether ranks share one stored copy."""
    out: dict[tuple[str, str], dict[str, Any]] = {}
    for job in plan.jobs:
        for kind, works in job.store.items():
            for work in works:
                item = work.item
                label = "vision" if kind == "vision" else item.name.split(".")[2 if item.unit is not None else 0]
                blank = {"family": label, "stored": kind, "tensors": 0, "rank_bytes": 0, "stored_bytes": 0}
                row = out.setdefault((label, kind), blank)
                row["tensors"] += 1
                row["rank_bytes"] += work.nbytes
                row["stored_bytes"] += work.nbytes * (plan.mesh.world if kind == "rank" else 1)
    return sorted(out.values(), key=lambda row: (row["stored"] != "rank", -row["stored_bytes"]))


def plan_facts(plan: Plan, workers: int, identity: dict[str, Any]) -> dict[str, Any]:
    """`kiln plan --json`. Byte counts are tensor data; disk_bytes adds headers."""
    files = list(plan.files)
    once = plan.data_bytes("common") + plan.data_bytes("vision")
    return {
        "source": {"repo": identity["repo"], "revision": identity["revision"]},
        "source_bytes": plan.source_bytes,
        "source_tensors": len(plan.header),
        "dropped_tensors": len(plan.expanded.dropped),
        "spec": plan.spec.name,
        "mesh": {"world": plan.mesh.world, "tp": plan.mesh.tp, "ep": plan.mesh.ep},
        "rank_bytes": [plan.data_bytes("rank", r) for r in range(plan.mesh.world)],
        "common_bytes": once,
        "vision_bytes": plan.data_bytes("vision"),
        "disk_bytes": plan.disk_bytes,
        "peak_memory_bytes": peak_memory(workers),
        "workers": workers,
        "files": len(files),
        "largest_file_bytes": max(f.size for f in files),
        "families": families(plan),
        "legal": legal_values(plan.expanded, plan.mesh.world),
    }


def plan_text(plan: Plan, facts: dict[str, Any], free: int) -> str:
    assert isinstance(plan.config, ModelConfig)
    t, mesh = plan.config.text, plan.mesh
    rows = [["family", "on each rank", "stored", "tensors a rank", ""]]
    for f in facts["families"]:
        how = "cut over ranks" if f["stored"] == "rank" else "shared, once"
        rows.append([f["family"], size(f["rank_bytes"]), size(f["stored_bytes"]), f"{f['tensors']:,}", how])
    sums = [sum(f[key] for f in facts["families"]) for key in ("rank_bytes", "stored_bytes", "tensors")]
    rows.append(["total", size(sums[0]), size(sums[1]), f"{sums[2]:,}", ""])
    copies = facts["common_bytes"] * (mesh.world - 1)
    return "\n".join(
        [
            f"source   {facts['source']['repo'] or plan.spec.repo + ' (by its tensors)'}: "
            f"{facts['source_tensors']:,} tensors, "
            f"{size(facts['source_bytes'])}",
            f"model    {t.layers} layers ({t.dense_layers} dense), {t.experts} experts top {t.top_k}, "
            f"hidden {t.hidden}, "
            f"vision {'yes' if plan.config.vision else 'no'}",
            f"mesh     world {mesh.world}, tp {mesh.tp}, ep {mesh.ep} (experts cut {mesh.etp} ways)",
            "",
            table(rows),
            "",
            f"per rank {', '.join(sorted({size(b) for b in facts['rank_bytes']}))} of its own, "
            f"{size(facts['common_bytes'])} shared; "
            f"storing the shared part once saves {size(copies)}",
            f"files    {facts['files']:,} parts, the largest {size(facts['largest_file_bytes'])}",
            f"disk     {size(facts['disk_bytes'])} needed, {size(free)} free here",
            f"memory   at most {size(facts['peak_memory_bytes'])} with {facts['workers']} workers",
            f"legal    tp {spell(facts['legal']['tp'])}; ep with world {mesh.world}: {spell(facts['legal']['ep'])}",
        ]
    )


def report_facts(report: Report, workers: int) -> dict[str, Any]:
    """`kiln convert --json`."""
    return {
        "artifact": str(report.out),
        "already_there": report.already_there,
        "seconds": round(report.seconds, 3),
        "bytes_read": report.bytes_read,
        "bytes_written": report.bytes_written,
        "files": report.files,
        "resumed_jobs": report.resumed_jobs,
        "waiting_jobs": report.waiting,
        "workers": workers,
        "peak_memory_bytes": report.peak_bytes,
        "wall_seconds": _rounded(report.wall),
        "core_seconds": _rounded(report.core),
        "logical_digest": report.logical,
        "warnings": list(report.warnings),
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {k: round(v, 3) for k, v in sorted(seconds.items())}


def report_text(report: Report, workers: int) -> str:
    if report.already_there:
        return f"{report.out} is already finished; nothing to do"
    if report.waiting:
        return (
            f"{report.out}: wrote {size(report.bytes_written)}, {report.waiting} parts are still in others' hands; "
            "whoever finishes last seals the artifact. If none is at work any more, run the same command again"
        )
    gigabytes = max(report.bytes_read / 1e9, 1e-9)
    rows = [["phase", "wall s", "core s", "core s/GB"]]
    for phase in sorted(report.core, key=lambda p: -report.wall[p]):
        rows.append(
            [phase, f"{report.wall[phase]:.2f}", f"{report.core[phase]:.2f}", f"{report.core[phase] / gigabytes:.2f}"]
        )
    resumed = f", {report.resumed_jobs} parts were there from an earlier run" if report.resumed_jobs else ""
    return "\n".join(
        [
            f"wrote {report.out}: {size(report.bytes_written)} from {size(report.bytes_read)} "
            f"in {report.seconds:.1f} s "
            f"({report.bytes_read / 1e9 / report.seconds:.2f} GB/s, {workers} workers{resumed})",
            f"peak memory {size(report.peak_bytes)}, bound {size(peak_memory(workers))}",
            "",
            table(rows),
            "",
            *(f"logical digest, {part}: {digest}" for part, digest in report.logical.items()),
        ]
    )


def inspect_facts(path: Path, sealed: dict[str, Any], provenance: dict[str, Any]) -> dict[str, Any]:
    """`kiln inspect --json`: the manifest without its long lists."""
    folders: dict[str, dict[str, int]] = defaultdict(lambda: {"files": 0, "bytes": 0})
    for file in sealed["files"]:
        folder = file["path"].rpartition("/")[0] or "."
        folders[folder]["files"] += 1
        folders[folder]["bytes"] += file["size"]
    source = {k: sealed["source"][k] for k in ("repo", "revision", "tensors", "bytes")}
    keys = ("version", "model", "mesh", "layouts", "parts", "logical", "digest")
    return {
        "artifact": str(path),
        **{k: sealed[k] for k in keys},
        "ranks": sealed.get("ranks", list(range(sealed["mesh"]["world"]))),
        "source": source,
        "folders": dict(folders),
        "dropped": sealed["coverage"]["dropped"],
        "drafts": [_inspected(folder) for folder in drafts(path)],
        "provenance": {k: provenance.get(k) for k in ("created", "command", "packages")},
    }


def _inspected(folder: Path) -> dict[str, Any]:
    m = manifest.read(folder)
    return {
        "name": folder.name,
        "kind": m.get("kind"),
        "target": m.get("target"),
        "bytes": sum(f["size"] for f in m["files"]),
        "digest": m["digest"],
    }


def inspect_text(facts: dict[str, Any]) -> str:
    rows = [
        ["folder", "files", "bytes"],
        *([n, str(f["files"]), size(f["bytes"])] for n, f in sorted(facts["folders"].items())),
    ]
    mesh, source, made = facts["mesh"], facts["source"], facts["provenance"]
    return "\n".join(
        [
            f"{facts['artifact']}: artifact format {facts['version']}, "
            f"{facts['model']['family']} by spec {facts['model']['spec']}",
            f"mesh     world {mesh['world']}, tp {mesh['tp']}, ep {mesh['ep']}; holds "
            + ("all ranks" if len(facts["ranks"]) == mesh["world"] else f"ranks {spell(facts['ranks'])} only"),
            f"source   {source['repo'] or 'a local folder'}{'@' + source['revision'] if source['revision'] else ''}: "
            f"{source['tensors']:,} tensors, {size(source['bytes'])}; parts {', '.join(facts['parts'])}",
            f"layouts  {', '.join(facts['layouts'])}",
            *(f"logical  {part}: {digest}" for part, digest in facts["logical"].items()),
            f"manifest {facts['digest']}",
            *(f"draft    {d['name']}: {d['kind']}, {size(d['bytes'])}" for d in facts["drafts"]),
            *([f"made     {made['created']}: {made['command']}"] if made["created"] is not None else []),
            "",
            table(rows),
        ]
    )
