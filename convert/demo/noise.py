"""Seeded random numbers, one independent stream per name, and BF16 bits without torch."""

from hashlib import sha256

import numpy as np
import numpy.typing as npt

from convert.demo.inventory import TensorSpec


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of `name`: the same whatever else is drawn, and in whatever order."""
    digest = sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """BF16 bits of finite fp32 `values`, rounded to nearest even; any shape."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def raw(values: npt.NDArray[np.generic]) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def noise(spec: TensorSpec, seed: int, name: str | None = None) -> memoryview:
    """Bytes of N(mean, std) in the spec's dtype, from the stream of `name`, which is the tensor's own unless given."""
    drawn = stream(seed, name or spec.name).standard_normal(spec.shape, dtype=np.float32)
    values = np.float32(spec.mean) + np.float32(spec.std) * drawn
    return raw(bf16(values) if spec.dtype == "BF16" else values)
