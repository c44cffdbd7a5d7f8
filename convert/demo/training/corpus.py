"""Text that lies on every machine with the required packages: documentation and sources, split into kept and held out.

A document is one file's docstrings with the names they belong to, one file's source, or one topic of Python's help.
"""

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple

from specs.errors import InputError

Kind = Literal["python", "packages", "code"]
# Required here, or by torch.
PACKAGES = ("numpy", "torch", "sympy", "networkx", "huggingface_hub", "PIL", "click", "jinja2", "tqdm")
COMPILED = ("math", "itertools", "time", "sys", "gc", "zlib", "array", "binascii", "cmath", "operator", "functools")
# Tests, vendored and generated code.
SKIPPED = frozenset({
    "test", "tests", "testing", "idle_test", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages",
    "__pycache__", "_vendor", "encodings", "config", "ensurepip", "_inductor", "_dynamo", "generated",
})  # fmt: skip
HELD_OUT_IN = 40


class CorpusError(InputError):
    """What training needs is not there, or does not fit."""


@dataclass(frozen=True, slots=True)
class Document:
    kind: Kind
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether training never sees it: one in HELD_OUT_IN, by the hash of its name without the kind."""
        return int.from_bytes(sha256(self.name.encode()).digest()[:4], "big") % HELD_OUT_IN == 0


class Entity(NamedTuple):
    """Something that has a docstring: `kind` is module, class, function, method, keyword or topic."""

    kind: str
    module: str
    name: str
    signature: str
    doc: str


class Parsed(NamedTuple):
    name: str
    source: str
    entities: tuple[Entity, ...]


def stdlib() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def package(name: str) -> Path | None:
    """The folder of an installed package; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def sources(root: Path) -> Iterator[Path]:
    """Python files below `root` in order, tests and vendored copies left out."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts[:-1]):
            yield path


def read(root: Path, prefix: str, workers: int) -> list[Parsed]:
    """Every file below `root` that is UTF-8 and parses, in order; `prefix` begins the modules' names."""
    jobs = [(path, root, prefix) for path in sources(root)]
    if workers < 2:
        found = [_parsed(job) for job in jobs]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
            found = list(pool.map(_parsed, jobs, chunksize=16))
    return [p for p in found if p is not None]


def _parsed(job: tuple[Path, Path, str]) -> Parsed | None:
    path, root, prefix = job
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    parts = path.relative_to(root).with_suffix("").parts
    module = ".".join((*([prefix] if prefix else []), *(p for p in parts if p != "__init__")))
    found = []
    if doc := ast.get_docstring(tree):
        found.append(Entity("module", module, module, "", doc))
    found += list(_members(tree.body, module, ""))
    return Parsed(f"{prefix}/{path.relative_to(root).as_posix()}", source, tuple(found))


def _members(body: list[ast.stmt], module: str, owner: str) -> Iterator[Entity]:
    """Documented classes, functions and methods of a body, in order."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = owner + node.name
            if doc := ast.get_docstring(node):
                kind = "method" if owner else "function"
                yield Entity(kind, module, name, f"{name}({ast.unparse(node.args)})", doc)
        elif isinstance(node, ast.ClassDef):
            if doc := ast.get_docstring(node):
                yield Entity("class", module, owner + node.name, f"class {owner}{node.name}", doc)
            yield from _members(node.body, module, f"{owner}{node.name}.")


def compiled() -> list[Parsed]:
    """Builtins and some modules without Python source, as `inspect` knows them."""
    out = []
    for module in (builtins, *map(importlib.import_module, COMPILED)):
        name = module.__name__
        found = [Entity("module", name, name, "", inspect.getdoc(module) or "")]
        for member, value in sorted(vars(module).items()):
            doc = inspect.getdoc(value)
            if member.startswith("_") or not doc or not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            try:
                signature = f"{member}{inspect.signature(value)}"
            except (TypeError, ValueError):
                signature = member
            found.append(Entity("class" if inspect.isclass(value) else "function", name, member, signature, doc))
        out.append(Parsed(f"compiled/{name}", "", tuple(found)))
    return out


def topics() -> list[Parsed]:
    """Python's help on keywords and topics."""
    texts: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return [
        Parsed(f"topics/{name}", "", (Entity("keyword" if _keyword(name) else "topic", "help", name, "", text),))
        for name, text in sorted(texts.items())
    ]


def _keyword(name: str) -> bool:
    return bool(importlib.import_module("keyword").iskeyword(name))


def document(kind: Kind, parsed: Parsed) -> Document:
    """What a file says about itself: every signature with its docstring."""
    return Document(kind, parsed.name, "".join(map(_entry, parsed.entities)))


def _entry(entity: Entity) -> str:
    doc = re.sub(r"\n{3,}", "\n\n", entity.doc.strip())
    head = f"{entity.kind} {entity.name}" if not entity.signature else f"{entity.module}: {entity.signature}"
    return f"{head}\n\n{doc}\n\n\n"


@dataclass(frozen=True, slots=True)
class Corpus:
    """missing: packages that are not installed here, and so were not read; whoever trains records them."""

    documents: tuple[Document, ...]
    entities: tuple[Entity, ...]
    missing: tuple[str, ...] = ()


def gather(workers: int, packages: tuple[str, ...] = PACKAGES) -> Corpus:
    """All documents, and the standard library's entities of files that are not held out."""
    here = {name: root for name in packages if (root := package(name))}
    missing = [name for name in packages if name not in here]
    missing += [] if package("pydoc_data") else ["pydoc_data"]
    python = [*([] if "pydoc_data" in missing else topics()), *compiled(), *read(stdlib(), "", workers)]
    documents = [document("python", p) for p in python]
    documents += [Document("code", p.name, p.source) for p in python if p.source]
    for name, root in here.items():
        documents += [document("packages", p) for p in read(root, name, workers)]
    entities = [e for p in python if not Document("python", p.name, "").held_out for e in p.entities]
    return Corpus(tuple(d for d in documents if d.text), tuple(entities), tuple(missing))
