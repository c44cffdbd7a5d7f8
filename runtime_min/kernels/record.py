"""Which kernels a model launches, found by running it on tensors without storage."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runtime_min.kernels.launch import Constant, Launch, Problem

POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of a kernel: the types of its run-time arguments, its constants, warps, stages, registers."""

    kernel: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, Constant], ...]
    warps: int
    stages: int
    registers: int = 0


def type_of(value: Any) -> str:
    """A run-time argument's type in the compiler's spelling."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int) and -(2**31) <= value < 2**31:
        return "i32"
    raise TypeError(f"no kernel takes {value!r}")


def variant(launch: Launch) -> Variant:
    """The compiled form that a launch needs."""
    types = tuple(map(type_of, launch.args))
    constants = tuple(sorted(launch.constants.items()))
    return Variant(launch.kernel, types, constants, launch.warps, launch.stages, launch.registers)


@dataclass
class Recorder:
    """Kernels that launch nothing and remember what they were asked."""

    choose: Callable[[Problem], Any]
    variants: dict[Variant, None] = field(default_factory=dict)
    problems: dict[Problem, None] = field(default_factory=dict)

    def pick(self, problem: Problem) -> Any:
        self.problems[problem] = None
        return self.choose(problem)

    def run(self, launch: Launch) -> None:
        self.variants[variant(launch)] = None

    @property
    def compiled(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Step:
    """A batch by its sizes alone: (query tokens, cached tokens with them) of every sequence; tree: the query tokens are
    the nodes of one, each of two children, not a chain."""

    sequences: tuple[tuple[int, int], ...]
    tree: bool = False

    @property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """As `batch` takes them."""
        return tuple(tuple((i + 1) // 2 - 1 for i in range(n)) for n, _ in self.sequences) if self.tree else ()


def trees() -> Iterator[Step]:
    """Steps that reach every kernel of trees: 1 to 64 nodes to as many sequences as there are room for."""
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256, 512):
            if count * nodes <= 1024:
                yield Step(((nodes, 64),) * count, tree=True)
                yield Step(((nodes, 2048),) * count, tree=True)


def steps(context: int) -> Iterator[Step]:
    """Batches that reach every kernel of a model up to `context` tokens: one token to 512 sequences, several query
    tokens a sequence, prefill by powers of two, with and without a long past."""
    for count in (1, 2, 3, 5, 8, 9, 16, 17, 32, 64, 128, 256, 512):
        yield Step(((1, 64),) * count)
        yield Step(((1, 2048),) * count)
        for queries in (2, 4, 8, 16):
            if count * queries <= 512:
                yield Step(((queries, 64),) * count)
                yield Step(((queries, 2048),) * count)
    longest = min(context, 1 << 18)
    for tokens in (17, 32, 64, 128, 256, 257, 512, 1024, 2048, 4096, 8192):
        if tokens <= longest:
            yield Step(((tokens, tokens),))
            yield Step(((tokens, longest),))
