"""Which Kiln this is: the version, and the commit where it can be known."""

import json
import subprocess
from importlib.metadata import distribution
from pathlib import Path

GIT_SECONDS = 10


def version_line() -> str:
    """`kiln 0.1.0 (commit 0123456789ab)`; of a copy that tells no commit, the version alone."""
    commit = _installed() or _cloned()
    return f"kiln {distribution('kiln').version}" + (f" (commit {commit[:12]})" if commit else "")


def _installed() -> str | None:
    """The commit that an installer fetched and wrote down."""
    record = json.loads(distribution("kiln").read_text("direct_url.json") or "{}")
    commit: str | None = record.get("vcs_info", {}).get("commit_id")
    return commit


def _cloned() -> str | None:
    """The commit of the clone that this file lies in."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
