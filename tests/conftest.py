"""Without a GPU Triton kernels run in its interpreter, which must be known before triton is imported.

Test processes share the cores, also those that they start: with more threads than cores small operations wait for each
other most of the time.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny demo checkpoint; tests copy it before they change it."""
    from convert.demo.checkpoint import write_demo
    from convert.demo.geometry import TINY

    folder = tmp_path_factory.mktemp("demo") / "model"
    write_demo(folder, TINY)
    yield folder


@pytest.fixture(scope="session")
def bench(demo: Path) -> Callable[..., Any]:
    """The real server over an engine double: `with bench("what it says") as b`."""
    from functools import partial

    from tests.serving import benched

    return partial(benched, demo)
