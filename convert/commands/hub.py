"""publish, fetch: an artifact to the hub, and a rank's part of it back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convert.commands.common import AS_JSON, emit
from specs.schema import archs

if TYPE_CHECKING:
    from convert.hub.publish import Published


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("repo")
@click.option("--private", is_flag=True, help="Create the repository for yourself; without it everyone can read it.")
@click.option("--dry-run", is_flag=True, help="Check everything, show what would be sent, send nothing.")
@click.option("--tag", default=None, help="Name the finished commit.")
@AS_JSON
def publish(artifact: Path, repo: str, private: bool, dry_run: bool, tag: str | None, as_json: bool) -> None:
    """Send ARTIFACT to the hub as REPO (owner/name), and prove that the hub holds it.

    First the whole artifact is looked at: the hub's limits, the licence, files that do not belong. Then one commit a
    folder, every file hashed before it is sent; the manifest comes last, so that an unfinished repository is no
    artifact. At the end the digests that the hub lists are compared with the manifest. An interrupted publication goes
    on where it stopped when the same command runs again. provenance.json with host, paths and command is not sent.
    """
    from convert.hub.publish import publish as run
    from convert.progress import Progress
    from convert.readers.hub import parse_id

    if (named := parse_id(repo)) is None or named[1] is not None:
        raise click.UsageError(f"REPO: found {repo!r}, expected owner/name")
    quiet_client()
    total = sum(f.stat().st_size for f in artifact.rglob("*") if f.is_file())
    with Progress("publish", 0 if dry_run else total) as progress:
        done = run(artifact, repo, private=private, dry_run=dry_run, tag=tag, progress=progress)
    for line in done.warnings:
        click.echo(f"warning: {line}", err=True)
    emit(as_json, published_facts(done, dry_run), published_text(done, dry_run))


def quiet_client() -> None:
    """The client's own bars are for terminals."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not sys.stderr.isatty():
        disable_progress_bars()


def published_facts(done: Published, dry_run: bool) -> dict[str, Any]:
    """`kiln publish --json`."""
    return {
        "repo": done.repo, "dry_run": dry_run, "files": done.files, "bytes": done.nbytes, "sent": done.missing,
        "commit": done.commit, "tag": done.tag,
    }  # fmt: skip


def published_text(done: Published, dry_run: bool) -> str:
    verb = "would send" if dry_run else "sent"
    lines = [f"{verb} {size / 1e9:10.3f} GB  {label}" for label, size in done.missing.items()]
    lines += [] if done.missing else ["nothing to send: the hub has every file"]
    whole = f"{done.repo}: {done.files} files, {done.nbytes / 1e9:.3f} GB"
    if dry_run:
        return "\n".join([*lines, f"{whole}; nothing was sent"])
    named = f", tag {done.tag}" if done.tag is not None else ""
    return "\n".join([*lines, f"{whole}; the hub's digests are the manifest's at commit {done.commit}{named}"])


@click.command()
@click.argument("repo", metavar="REPO[@REVISION]")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the artifact, or for its part.")
@click.option("--rank", type=int, multiple=True, help="A rank to fetch; may be given again.  [default: all]")
@click.option("--arch", type=click.Choice(list(archs())), default=None, help="Take along what was compiled for it.")
@click.option("--draft", multiple=True, metavar="NAME", help="A draft to fetch; may be given again.  [default: all]")
@click.option("--no-drafts", is_flag=True, help="Take no draft along.")
@AS_JSON
def fetch(
    repo: str,
    out: Path,
    rank: tuple[int, ...],
    arch: str | None,
    draft: tuple[str, ...],
    no_drafts: bool,
    as_json: bool,
) -> None:
    """Take an artifact, or what some of its ranks need, from the hub.

    Every file is hashed on arrival and gets its name only if its sha256 is the manifest's. An interrupted fetch goes
    on in the middle of a file when the same command runs again; with other ranks or drafts it adds those.
    """
    from convert.hub.fetch import Wanted
    from convert.hub.fetch import fetch as run
    from convert.progress import Progress
    from convert.readers.hub import parse_id

    if (named := parse_id(repo)) is None:
        raise click.UsageError(f"REPO: found {repo!r}, expected owner/name or owner/name@revision")
    if draft and no_drafts:
        raise click.UsageError("--draft and --no-drafts contradict each other")
    drafts = draft or (() if no_drafts else None)
    with Progress("fetch", 0) as progress:

        def told(n: int, total: int) -> None:
            progress.expect(total)
            progress(n)

        done = run(Wanted(repo=named[0], revision=named[1], ranks=rank, arch=arch, drafts=drafts), out, told)
    ranks = ", ".join(map(str, done.ranks))
    facts = {
        "out": str(out), "commit": done.commit, "ranks": list(done.ranks), "drafts": list(done.drafts), "arch": arch,
        "files": done.files, "bytes": done.nbytes, "already_there": done.already,
    }  # fmt: skip
    text = f"{out}: ranks {ranks} of {repo}, {done.nbytes / 1e9:.3f} GB in {done.files} files, every sha256 checked"
    emit(as_json, facts, text)
