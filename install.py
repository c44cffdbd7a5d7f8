"""Makes .venv and installs Kiln into it. Needs Python >= 3.11 and nothing else; `make install` calls it.

Without an NVIDIA GPU torch comes in its CPU build: the CUDA build brings gigabytes that nothing here would use.
"""

import hashlib
import shutil
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).parent
VENV = ROOT / ".venv"
STAMP = VENV / "kiln-installed"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INPUTS = ("pyproject.toml", "tests/constraints.txt", "install.py")


def has_gpu() -> bool:
    return (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )


def reachable(url: str) -> bool:
    """Does the index answer within three seconds?"""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=3):
            return True
    except OSError:
        return False


def pip(*args: str) -> None:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", *args]
    if subprocess.run(command).returncode:
        sys.exit(f"install: failed: {' '.join(command)}")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (runs before anything checks the version)
        sys.exit(f"install: Python {sys.version.split()[0]} is too old; use 3.11 or newer (make PYTHON=python3.12 ...)")
    facts = "".join((ROOT / name).read_text() for name in INPUTS) + sys.version
    wanted = hashlib.sha256(facts.encode()).hexdigest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    if not (VENV / "bin" / "python").exists():
        print(f"install: making {VENV}")
        venv.create(VENV, with_pip=True)
    constraints: list[str] = []
    if not has_gpu():
        constraints = ["-c", str(ROOT / "tests" / "constraints.txt")]
        print("install: no GPU found, taking the CPU build of torch")
        index = ["--extra-index-url", CPU_INDEX] if reachable(CPU_INDEX) else []
        pip(*constraints, *index, "torch")
    print("install: kiln and its tools")
    pip(*constraints, "-e", f"{ROOT}[dev]")
    STAMP.write_text(wanted)


if __name__ == "__main__":
    main()
