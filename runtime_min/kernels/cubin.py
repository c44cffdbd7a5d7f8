"""Launches of kernels that were compiled ahead of time, through the CUDA driver: no Triton, no compiler, no cache."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime_min.kernels import index
from runtime_min.kernels.index import Compiled, KernelError
from runtime_min.kernels.launch import Launch, Problem
from runtime_min.kernels.record import Variant, variant
from specs import manifest

MAX_DYNAMIC_SHARED = 8
PROGRAMMATIC_STREAM_SERIALIZATION = 6
STATIC_LIMIT = 48 << 10
CTYPES: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class Attribute(ctypes.Structure):
    """CUlaunchAttribute with a value that is an int, the first of 64 bytes of many kinds."""

    _fields_ = (
        ("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60),
    )  # fmt: skip


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class Driver:
    """The few calls of libcuda that loading and launching take."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise KernelError(f"libcuda.so.1: {e}; compiled kernels need the NVIDIA driver") from e
        # torch's context becomes the current one of this thread.
        torch.zeros(1, device="cuda")

    def __call__(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, ctypes.byref(text))
            raise KernelError(f"{name}: CUDA error {code}: {(text.value or b'').decode()}")

    def function(self, image: bytes, symbol: str, shared: int) -> ctypes.c_void_p:
        """A kernel of a cubin, allowed the shared memory it wants."""
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadData", ctypes.byref(module), image)
        self("cuModuleGetFunction", ctypes.byref(handle), module, symbol.encode())
        if shared > STATIC_LIMIT:
            self("cuFuncSetAttribute", handle, MAX_DYNAMIC_SHARED, shared)
        return handle


def arch_here() -> str:
    """The architecture of the current GPU, as the specs call it."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def overlaps_here() -> bool:
    """Can the current GPU begin a launch before the one before it ends?"""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


class Loaded:
    """Compiled kernels on this GPU, by what they are a compiled form of. overlap: on GPUs that can, a launch may begin
    before the one before it ends; kernels then wait on the card."""

    def __init__(self, overlap: bool = True) -> None:
        self.driver = Driver()
        self.early = Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1) if overlap and overlaps_here() else None
        self.kernels: dict[Variant, tuple[Compiled, ctypes.c_void_p]] = {}

    def add(self, kernel: Compiled, image: bytes) -> None:
        handle = self.driver.function(image, kernel.symbol, kernel.shared_bytes)
        self.kernels[kernel.variant] = (kernel, handle)

    def run(self, launch: Launch, key: Variant) -> None:
        """Launches on the current stream."""
        kernel, handle = self.kernels[key]
        values = [_value(launch, type_, value) for type_, value in zip(key.types, launch.args, strict=True)]
        room = [torch.empty(max(1, n) * _blocks(launch), dtype=torch.uint8, device="cuda") for n in kernel.scratch if n]
        scratch = iter(room)
        values += [ctypes.c_void_p(next(scratch).data_ptr() if n else 0) for n in kernel.scratch]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        config = Config(launch.grid, (kernel.threads, 1, 1), kernel.shared_bytes, stream)
        if self.early is not None and launch.overlap:
            config.attributes, config.count = ctypes.pointer(self.early), 1
        self.driver("cuLaunchKernelEx", ctypes.byref(config), handle, addresses, None)


class Cubins:
    """Kernels of one artifact, whose index has this digest. Everything is loaded and checked at once; what is missing
    is named when it is wanted."""

    compiled = 0

    def __init__(
        self, artifact: Path, arch: str, weights: str, choose: Callable[[Problem], Any], overlap: bool = True
    ) -> None:
        self.artifact, self.arch, self.pick = artifact, arch, choose
        self.loaded = Loaded(overlap)
        self.digest = str(manifest.read_json(index.folder(artifact, arch) / index.NAME)["digest"])
        for kernel in index.read(artifact, arch, weights).values():
            self.loaded.add(kernel, index.image(artifact, arch, kernel))

    def run(self, launch: Launch) -> None:
        key = variant(launch)
        if key not in self.loaded.kernels:
            raise KernelError(
                f"kernels/{self.arch}: has no {key.kernel} for {dict(key.constants)}, {key.types}, {key.warps} warps; "
                + index.rebuild(self.artifact, self.arch)
            )
        self.loaded.run(launch, key)


def _blocks(launch: Launch) -> int:
    return launch.grid[0] * launch.grid[1] * launch.grid[2]


def _value(launch: Launch, type_: str, value: Any) -> Any:
    """One argument as the driver takes it. Pointers were promised to the compiler to be multiples of 16."""
    if not isinstance(value, Tensor):
        return CTYPES[type_](value)
    pointer = value.data_ptr()
    if pointer % 16:
        raise KernelError(f"{launch.kernel}: a {type_[1:]} tensor of shape {list(value.shape)} is not on 16 bytes")
    return ctypes.c_void_p(pointer)
