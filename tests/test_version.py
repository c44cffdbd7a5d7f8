"""Which version and driver are told at the start."""

import subprocess
from pathlib import Path

import pytest

from runtime_min import about, version


def test_a_clone_tells_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "runtime_min"
    package.mkdir()
    (package / "version.py").touch()
    monkeypatch.setattr(version, "__file__", str(package / "version.py"))
    assert version.version_line() == f"kiln {version.distribution('kiln').version}"
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    told = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert version.version_line().endswith(f" (commit {told.stdout[:12]})")


LINE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26\nGCC 12.2.0"


@pytest.mark.parametrize(("text", "found"), [(LINE, "570.124.06"), ("", "unknown")])
def test_the_driver_is_read_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: str
) -> None:
    monkeypatch.setattr(about, "DRIVER", tmp_path / "version")
    assert about.driver() == "unknown"
    about.DRIVER.write_text(text)
    assert about.driver() == found
