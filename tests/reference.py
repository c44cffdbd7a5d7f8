"""transformers' own implementation of a demo checkpoint, experts dequantized in FP32 without rounding."""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file

VISION_NAMES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}


def dequantized(model: Path, out: Path) -> Path:
    """A copy of a checkpoint with dense FP32 tensors under the checkpoint's names, and a config transformers reads."""
    out.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            shape = torch.Size(tensors[f"{stem}.weight_shape"].tolist())
            codes = unpack_from_int32(tensor, 4, shape)
            dense[f"{stem}.weight"] = codes.float() * tensors[f"{stem}.weight_scale"].float().repeat_interleave(32, 1)
        elif suffix not in ("weight_scale", "weight_shape"):
            dense[name] = tensor.float()
    save_file(dense, out / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    config["text_config"].pop("quantization_config")
    config.pop("auto_map")
    config["text_config"].pop("auto_map")
    vision = config["vision_config"]
    config["vision_config"] = {
        VISION_NAMES.get(k, k): v for k, v in vision.items() if k not in ("_attn_implementation",)
    }
    config["projection_hidden_size"] = vision["mm_hidden_size"]
    config["image_token_id"] = config["media_placeholder_token_id"]
    for block in (config, config["text_config"]):
        block["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config))
    return out


def reference(folder: Path) -> Any:
    """The loaded model, float32 and eager; fails if any weight of the text model was not filled from the file."""
    from transformers import AutoModelForImageTextToText

    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()
