"""Sizes that a config.json may state, measured against what is there: before anything is expanded from them."""

from specs.dims import ModelConfig
from specs.errors import ConfigError

LAYER_TENSORS = 9
EXPERT_TENSORS = 9
BLOCK_TENSORS = 12
# More names than any real checkpoint lacks, and few enough to list them in a second.
SPARE = 300_000


def check_sizes(config: ModelConfig, tensors: int) -> None:
    """ConfigError if config.json speaks of so many layers or experts that `tensors` tensors cannot be theirs."""
    t, blocks = config.text, config.vision.vit_layers if config.vision else 0
    stated = t.layers * LAYER_TENSORS + (t.layers - t.dense_layers) * t.experts * EXPERT_TENSORS
    stated += blocks * BLOCK_TENSORS
    if stated > tensors + SPARE:
        raise ConfigError(
            f"config.json: {t.layers} layers, {t.experts} experts and {blocks} vision blocks make over {stated:,} "
            f"tensors, the checkpoint has {tensors:,}; is config.json damaged or of another model?"
        )
