"""kiln-run serve: the OpenAI-compatible server over an artifact."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from runtime_min.artifact import Artifact
from runtime_min.request import Limits
from specs.errors import InputError

FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


def has_grammars() -> bool:
    """Is the extra `grammar` installed?"""
    return find_spec("xgrammar") is not None


def need(extra: str, what: str) -> None:
    """InputError that names the extra unless its packages are there."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as e:
        raise InputError(f"{what} needs `pip install 'kiln[{extra}]'`: {e}") from e


def options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--interval", default=10.0, help="Seconds between lines of status; 0 for none."),
        click.option("--drain-seconds", default=60.0, help="Seconds that requests have to end after SIGTERM."),
        click.option("--request-seconds", default=3600.0, help="Seconds that one request may take."),
        click.option("--body-mb", default=64, help="Megabytes of one request."),
        click.option("--choices", default=16, help="Choices (n, prompts) of one request."),
        click.option(
            "--media-host", "hosts", multiple=True,
            help="Host whose http and https pictures are fetched, even at a private address; * for all public ones.",
        ),
        click.option("--media-root", type=FOLDER, default=None, help="Folder whose files requests may name."),
        click.option(
            "--api-key", "keys", multiple=True, envvar="KILN_API_KEY", help="Key that /v1 asks for; may be repeated."
        ),
        click.option("--name", default="kimi-k2.6", help="The model's name in the API."),
        click.option("--port", type=click.IntRange(0, 65535), default=8000),
        click.option("--host", default="127.0.0.1", help="0.0.0.0 for everyone."),
    ):  # fmt: skip
        command = option(command)
    return command


def run(run: Any, limits: Limits, given: dict[str, Any]) -> None:
    """Loads the artifact, says what was found, and serves until a signal ends it."""
    need("serve", "serve")
    from runtime_min.engine import Engine
    from runtime_min.serve import start
    from runtime_min.serve.fetch import Fetch
    from runtime_min.serve.http import to_stderr
    from runtime_min.serve.pump import Pump
    from runtime_min.serve.run import bound, serve
    from runtime_min.serve.server import Rules, Server

    # What is cheap to get wrong is found before the weights are read.
    sock = bound(given["host"], given["port"])
    artifact = Artifact.open(run.artifact, verify=False)
    start.defaults(artifact.path)
    engine = Engine(run.artifact, limits, **run.how)
    hosts = frozenset(given["hosts"])
    what = start.served(
        artifact, engine.bounds, name=given["name"], choices=given["choices"], root=given["media_root"],
        with_grammars=limits.grammars,
        fetch=Fetch(hosts=hosts) if hosts else None,
    )  # fmt: skip
    rules = Rules(keys=tuple(given["keys"]), seconds=given["request_seconds"], body=given["body_mb"] << 20)
    server = Server(what, Pump(engine), rules)
    for line in start.lines(artifact, what, engine.link.about):
        to_stderr(line)
    if not rules.keys and given["host"] not in ("127.0.0.1", "localhost", "::1"):
        to_stderr("warning: whoever reaches this address may use it; give --api-key")
    host, port = sock.getsockname()[:2]
    to_stderr(f"serving: http://{f'[{host}]' if ':' in host else host}:{port} (page), /v1 (API), /metrics")
    serve(server, sock, given["drain_seconds"], given["interval"])
