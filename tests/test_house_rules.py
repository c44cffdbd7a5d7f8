"""The architecture, read off the sources: who imports whom, how long a file is, what a package may say."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("specs", "runtime_min", "convert")
FILES = sorted(p for package in OURS for p in (ROOT / package).rglob("*.py"))
MAY: dict[str, tuple[str, ...]] = {
    "specs": (),
    "runtime_min": ("specs",),
    "convert": ("specs", "runtime_min.kernels.layouts"),
}
WITHOUT_TRITON = ("specs", "convert")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name(path)}: relative import"
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        if module.split(".")[0] in OURS and module.split(".")[0] != package:
            assert any(module == m or module.startswith(m + ".") for m in MAY[package]), (
                f"{name(path)} imports {module}"
            )


def test_specs_need_nothing_but_yaml() -> None:
    import sys

    for path in FILES:
        if path.relative_to(ROOT).parts[0] == "specs":
            for module in imports(path):
                top = module.split(".")[0]
                assert top in ("specs", "yaml") or top in sys.stdlib_module_names, f"{name(path)} imports {module}"


def test_triton_is_imported_by_device_code_and_its_compiler_only() -> None:
    for path in FILES:
        if any(m.split(".")[0] == "triton" for m in imports(path)):
            known = ("kernel.py", "compat.py", "compile.py")
            assert path.name in known or path.name.endswith("_device.py"), name(path)


def test_references_need_torch_alone() -> None:
    for path in FILES:
        if path.name == "ref.py":
            tops = {m.split(".")[0] for m in imports(path)}
            assert "triton" not in tops, name(path)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400, name(path)
    if path.name == "__init__.py":
        assert len(text.splitlines()) <= 20, name(path)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            limit = 100 if path.name in ("kernel.py",) or path.name.endswith("_device.py") else 55
            assert node.end_lineno - node.lineno < limit, f"{name(path)}: {node.name}"


def test_the_environment_is_read_in_two_places_only() -> None:
    for path in FILES:
        if "os.environ" in path.read_text() or "getenv" in path.read_text():
            assert path.name in ("cli.py", "compat.py"), name(path)


def test_every_module_says_what_it_is() -> None:
    for path in FILES:
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(ast.parse(text)) or path.name == "__init__.py", name(path)


def test_readme_commands_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", readme)):
        assert re.search(rf"^{target}:", makefile, re.M), target
    assert "make convert" in readme and "make test" in readme
