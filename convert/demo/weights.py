"""Weights of a small demo: every value drawn, experts quantized and packed by the compressed-tensors library."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from convert.demo.geometry import GROUP
from convert.demo.inventory import TensorSpec
from convert.demo.noise import noise, raw, stream


def scheme(quantization_config: dict[str, Any]) -> QuantizationScheme:
    """The library's own object for the one group of a checkpoint's quantization_config."""
    return QuantizationScheme(**quantization_config["config_groups"]["group_0"])


def payloads(specs: Sequence[TensorSpec], seed: int, how: QuantizationScheme) -> Iterator[Iterator[memoryview]]:
    """The bytes of each of one file's tensors, in the order of `specs`."""
    experts: dict[str, memoryview] = {}
    for spec in specs:
        if spec.kind == "packed":
            experts |= expert(spec, seed, how)
    for spec in specs:
        yield iter((noise(spec, seed) if spec.kind == "noise" else experts[spec.name],))


def expert(spec: TensorSpec, seed: int, how: QuantizationScheme) -> dict[str, memoryview]:
    """The three stored tensors of one INT4 weight, by name, from a random fp32 weight [O, I].

    weight_packed [O, I/8] int32, weight_scale [O, I/32] BF16, weight_shape [2] int32. The grid is the library's
    min-max one (largest magnitude / 7.5), so a group whose largest value is negative holds the code -8.
    """
    module = spec.name.removesuffix(".weight_packed")
    drawn = stream(seed, module).standard_normal(spec.logical, dtype=np.float32)
    weight = torch.from_numpy(drawn * np.float32(spec.std))
    groups = weight.view(spec.logical[0], -1, GROUP)  # [O, I/32, 32]
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), how.weights)
    packed = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale.to(torch.bfloat16)}, how)
    return {
        f"{module}.weight_packed": raw(packed["weight_packed"].numpy()),
        f"{module}.weight_scale": raw(packed["weight_scale"].view(torch.uint16).numpy()),
        # The library writes int64; the release stores int32.
        f"{module}.weight_shape": raw(packed["weight_shape"].to(torch.int32).numpy()),
    }
