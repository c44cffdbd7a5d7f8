"""Options that commands share: how an artifact runs, and what its engine may take on."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from runtime_min.collectives import SUMS
from runtime_min.drafts import require
from runtime_min.launch import DTYPES, Run
from runtime_min.request import MOST_BUDGET, MOST_DRAFTS, Limits

RUN = ("device", "dtype", "ops", "sums", "inner_eps")
LIMITS = ("running", "waiting", "step_tokens", "context", "cache_tokens")
DRAFTS = ("draft", "spec_tokens", "spec_tree", "spec_adaptive")


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of how an artifact runs, which the command gets as `run`."""

    @wraps(command)
    def with_run(artifact: Path, no_verify: bool, **given: Any) -> None:
        run = Run(artifact=artifact, verify=not no_verify, **{name: given.pop(name) for name in RUN})
        command(artifact=artifact, run=run, **given)

    wrapped: Callable[..., None] = with_run
    for option in (
        click.option(
            "--no-verify", is_flag=True, help="Do not check this rank's files by sha256 before loading them."
        ),
        click.option("--inner-eps", type=float, default=1e-6, help="Epsilon of the two norms inside MLA."),
        click.option(
            "--sums", type=click.Choice(SUMS), default=None,
            help="How ranks on GPUs add up; auto is symmetric where the GPUs allow it.  [default: nccl]",
        ),
        click.option(
            "--ops", type=click.Choice(["ref", "triton"]), default=None, help="[default: triton on cuda, ref on cpu]"
        ),
        click.option(
            "--dtype", type=click.Choice(list(DTYPES)), default=None,
            help="[default: bfloat16 on cuda, float32 on cpu]",
        ),
        click.option(
            "--device", type=click.Choice(["cpu", "cuda"]), default=None,
            help="[default: cuda if there are enough GPUs]",
        ),
    ):  # fmt: skip
        wrapped = option(wrapped)
    return wrapped


def limit_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of the engine's limits, which the command gets as `limits`."""

    @wraps(command)
    def with_limits(drafts: dict[str, Any], **given: Any) -> None:
        command(limits=Limits(**{name: given.pop(name) for name in LIMITS}, **drafts), **given)

    wrapped: Callable[..., None] = draft_options(with_limits)
    for option in (
        click.option("--cache-tokens", type=click.IntRange(1), help="Tokens in the cache.  [default: what fits]"),
        click.option("--context", type=click.IntRange(1), help="Tokens of a request.  [default: the model's]"),
        click.option("--step-tokens", type=click.IntRange(1), default=2048, help="Tokens in one step."),
        click.option("--waiting", type=click.IntRange(1), default=1024, help="Requests that may wait; more get a 429."),
        click.option("--running", type=click.IntRange(1), default=64, help="Requests in one step."),
    ):
        wrapped = option(wrapped)
    return wrapped


def draft_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options of speculative decoding, which the command gets as `drafts`, fields of Limits. A name that the artifact
    does not have is refused before anything is loaded."""

    @wraps(command)
    def with_drafts(artifact: Path, **given: Any) -> None:
        drafts = {name: given.pop(name) for name in DRAFTS}
        if drafts["draft"] is not None:
            require(artifact, drafts["draft"])
        elif drafts["spec_tokens"] is not None or drafts["spec_tree"]:
            raise click.UsageError("--spec-tokens and --spec-tree-budget go with --draft")
        command(artifact=artifact, drafts=drafts, **given)

    wrapped: Callable[..., None] = with_drafts
    for option in (
        click.option(
            "--spec-adaptive/--no-spec-adaptive", default=True,
            help="Draft fewer tokens, or none, where they do not pay.",
        ),
        click.option(
            "--spec-tree-budget", "spec_tree", type=click.IntRange(0, MOST_BUDGET), default=0,
            help="Nodes of a tree of drafted tokens; 0 for a chain.",
        ),
        click.option(
            "--spec-tokens", type=click.IntRange(1, MOST_DRAFTS), default=None,
            help="Tokens drafted in a row at most.  [default: 3 of EAGLE3, the block of DFlash]",
        ),
        click.option("--draft", default=None, help="Name of the artifact's draft.  [default: none]"),
    ):  # fmt: skip
        wrapped = option(wrapped)
    return wrapped
