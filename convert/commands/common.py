"""What the commands share: flags, the mesh they spell, and how results and errors are printed."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specs.errors import CutError, InputError
from specs.mesh import Mesh
from specs.schema import archs

DEMO = "build/demo/checkpoint"

WORKERS = click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=None,
    help="Worker threads.  [default: cores, at most 16]",
    show_default=False,
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Machine-readable result on stdout, all else on stderr.")


class Kiln(click.Group):
    """Wrong input ends with its problems on stderr and exit code 1, wrong usage with 2, never with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as e:
            for line in e.lines():
                click.echo(f"error: {line}", err=True)
        except BrokenPipeError:
            raise
        except OSError as e:
            click.echo(f"error: {e.filename or ''}: {e.strerror or e}", err=True)
        raise click.exceptions.Exit(1)


def workers_default() -> int:
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16)


def mesh_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        [
            click.option("--arch", default="sm90", help="GPU architecture to prepare for: " + ", ".join(archs()) + "."),
            click.option(
                "--world", type=int, default=None, help="Ranks (GPUs) in all.  [default: tp]", show_default=False
            ),
            click.option("--tp", type=int, default=8, help="Ranks that share one copy of the dense tensors."),
            click.option("--ep", type=int, default=1, help="Groups that the routed experts are shared out to."),
            click.option(
                "--draft",
                multiple=True,
                metavar="PATH[=NAME]",
                help="A speculative draft to convert along, called like its folder unless named; may be given again.",
            ),
            WORKERS,
            AS_JSON,
        ]
    ):
        command = option(command)
    return command


def checked(arch: str, world: int | None, tp: int, ep: int) -> Mesh:
    """The mesh of the flags; a UsageError for what no model could satisfy."""
    known = archs()
    if arch not in known:
        raise click.UsageError(f"--arch: found {arch!r}, known are {', '.join(known)}")
    try:
        return Mesh(world=tp if world is None else world, tp=tp, ep=ep)
    except CutError as e:
        raise click.UsageError("; ".join(e.problems)) from e


def emit(as_json: bool, facts: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(facts, indent=1) if as_json else text)


def program(name: str) -> str:
    """How a user types one of our programs: by name, or by path while the environment is not activated."""
    if shutil.which(name):
        return name
    return shlex.quote(os.path.relpath(Path(sys.executable).with_name(name)))


def default_out(model: str, mesh: Mesh) -> Path:
    name = Path(model.split("@")[0]).name
    return Path("build") / ("demo" if model == DEMO else name) / str(mesh)


def make_plan(source: Any, mesh: Mesh, arch: str, text_only: bool = False, ranks: tuple[int, ...] = ()) -> Any:
    """The plan for a source, with every layout readable on the architecture."""
    from convert.shard.plan import plan as make
    from specs.config import read_config
    from specs.schema import load

    config, header = read_config(source.config), source.header
    made = make(load("kimi_k2_6"), config, header, mesh, text_only=text_only, ranks=ranks)
    needed = {w.form.layout for f in made.files for w in f.work}
    unreadable = sorted(needed - set(archs()[arch]["layouts"]))
    if unreadable:
        raise InputError(f"--arch {arch}: no kernels there read the layouts {', '.join(unreadable)}")
    return made
