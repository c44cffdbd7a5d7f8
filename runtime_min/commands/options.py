"""Options that commands share: how an artifact runs, and what its engine may take on."""

from collections.abc import Callable
from pathlib import Path

import click

from runtime_min.collectives import SUMS
from runtime_min.launch import DTYPES, Run


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        [
            click.option(
                "--device",
                type=click.Choice(["cpu", "cuda"]),
                default=None,
                help="[default: cuda if there are enough GPUs]",
            ),
            click.option(
                "--dtype",
                type=click.Choice(list(DTYPES)),
                default=None,
                help="[default: bfloat16 on cuda, float32 on cpu]",
            ),
            click.option(
                "--ops",
                type=click.Choice(["ref", "triton"]),
                default=None,
                help="[default: triton on cuda, ref on cpu]",
            ),
            click.option(
                "--sums",
                type=click.Choice(SUMS),
                default=None,
                help="How ranks on GPUs add up; auto is symmetric where the GPUs allow it.  [default: nccl]",
            ),
            click.option("--inner-eps", type=float, default=1e-6, help="Epsilon of the two norms inside MLA."),
            click.option(
                "--no-verify", is_flag=True, help="Do not check this rank's files by sha256 before loading them."
            ),
        ]
    ):
        command = option(command)
    return command


def chosen(
    artifact: Path,
    device: str | None,
    dtype: str | None,
    ops: str | None,
    sums: str | None,
    inner_eps: float,
    no_verify: bool,
) -> Run:
    return Run(
        artifact=artifact, device=device, dtype=dtype, ops=ops, inner_eps=inner_eps, verify=not no_verify, sums=sums
    )


def limit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of the engine's limits."""
    for option in (
        click.option("--cache-tokens", type=click.IntRange(1), help="Tokens in the cache.  [default: what fits]"),
        click.option("--context", type=click.IntRange(1), help="Tokens of a request.  [default: the model's]"),
        click.option("--step-tokens", type=click.IntRange(1), default=2048, help="Tokens in one step."),
        click.option("--waiting", type=click.IntRange(1), default=1024, help="Requests that may wait; more get a 429."),
        click.option("--running", type=click.IntRange(1), default=64, help="Requests in one step."),
    ):
        command = option(command)
    return command
