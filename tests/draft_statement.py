"""Sections 7 and 8 of the checkpoint's reference in plain torch: dense, whole sequences, no cache, no pages, no ranks.

Nothing here is shared with the runtime: weights go by the names of the files, sizes by those of config.json.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

W = dict[str, Tensor]
Config = dict[str, Any]
YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
EAGLE: Config = {
    "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96, "vocab_size": 120, "rope_theta": 100.0,
    "num_attention_heads": 4, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
}  # fmt: skip
MLA: Config = EAGLE | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "rms_norm_eps": 1e-5, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "rope_scaling": YARN | {"beta_fast": 1.0},
}  # fmt: skip
MLA31: Config = MLA | {"fc_norm": True, "norm_output": True}
LLAMA: Config = EAGLE | {
    "architectures": ["LlamaForCausalLMEagle3"], "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": 16,
    "rope_scaling": YARN | {"beta_fast": 32.0},
}  # fmt: skip
DFLASH: Config = {
    "architectures": ["DFlashDraftModel"], "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
    "vocab_size": 120, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-5,
    "rope_theta": 100.0, "rope_scaling": YARN | {"beta_fast": 32.0, "type": "deepseek_yarn"}, "block_size": 4,
    "dflash_config": {"mask_token_id": 118, "target_layer_ids": [0, 2, 3, 4], "causal": False}, "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a file but embedding, head and id table."""
    h, f, n = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    if "dflash_config" in c:
        q, kv = n * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        layer = {
            "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q), "self_attn.q_norm": (c["head_dim"],), "self_attn.k_norm": (c["head_dim"],),
        }  # fmt: skip
        found: dict[str, tuple[int, ...]] = {
            "fc": (h, h * len(c["dflash_config"]["target_layer_ids"])), "hidden_norm": (h,)
        }  # fmt: skip
    else:
        layer = {"hidden_norm": (h,)}
        found = {"fc": (h, 3 * h)} | {f"fc_norm.{i}": (h,) for i in range(3) if c.get("fc_norm")}
        if "q_lora_rank" in c:
            q, kv, nope, rope = (c[k] for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
            v = c["v_head_dim"]
            layer |= {
                "self_attn.q_a_proj": (q, 2 * h), "self_attn.q_a_layernorm": (q,),
                "self_attn.q_b_proj": (n * (nope + rope), q), "self_attn.kv_a_proj_with_mqa": (kv + rope, 2 * h),
                "self_attn.kv_a_layernorm": (kv,), "self_attn.kv_b_proj": (n * (nope + v), kv),
                "self_attn.o_proj": (h, n * v),
            }  # fmt: skip
        else:
            q, kv = n * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
            layer |= {
                "self_attn.q_proj": (q, 2 * h), "self_attn.k_proj": (kv, 2 * h), "self_attn.v_proj": (kv, 2 * h),
                "self_attn.o_proj": (h, q),
            }  # fmt: skip
    layer |= {
        "input_layernorm": (h,), "post_attention_layernorm": (h,), "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h),
        "mlp.down_proj": (h, f),
    }  # fmt: skip
    for i in range(c["num_hidden_layers"]):
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in (found | {"norm": (h,)}).items()}


def randomized(c: Config, seed: int, **more: tuple[int, ...]) -> W:
    """Weights that keep activations near 1; more: further tensors, as lm_head=(rows, hidden)."""
    g = torch.Generator().manual_seed(seed)
    every = shapes(c) | {f"{name}.weight": shape for name, shape in more.items()}
    return {
        n: torch.randn(s, generator=g) * s[-1] ** -0.5 if len(s) > 1 else 0.5 + torch.rand(s, generator=g)
        for n, s in every.items()
    }


def rms(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(torch.mean(x * x, -1, keepdim=True) + eps) * gamma


def mscale(factor: float, m: float) -> float:
    return 0.1 * m * math.log(factor) + 1


def angles(c: Config, dim: int, positions: Tensor) -> Tensor:
    """Radians [n, dim / 2] of the draft's own YaRN block."""
    b, theta = c["rope_scaling"], c["rope_theta"]

    def turn(beta: float) -> float:
        return float(
            dim * math.log(b["original_max_position_embeddings"] / (beta * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = max(0, math.floor(turn(b["beta_fast"]))), min(dim - 1, math.ceil(turn(b["beta_slow"])))
    speeds = []
    for j in range(dim // 2):
        ramp = min(1.0, max(0.0, (j - low) / max(high - low, 0.001)))
        plain = theta ** (-2 * j / dim)
        speeds.append((1 - ramp) * plain + ramp * plain / b["factor"])
    return positions[:, None].float() * torch.tensor(speeds)


def halves(x: Tensor, angle: Tensor, amplitude: float = 1.0) -> Tensor:
    """x [n, heads, D], pair (j, j + D / 2)."""
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    cos, sin = angle.cos()[:, None] * amplitude, angle.sin()[:, None] * amplitude
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def pairs(x: Tensor, angle: Tensor) -> Tensor:
    """x [n, heads, D], pair (2 j, 2 j + 1)."""
    out = torch.empty_like(x)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
    return out


def softmaxed(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> Tensor:
    """q [n, heads, D], k and v [m, heads, D], seen [n, m] -> [n, heads * D]."""
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    p = torch.softmax(torch.where(seen, scores, torch.tensor(-torch.inf)), -1)
    return torch.einsum("hnm,mhd->nhd", p, v).flatten(1)


def mla(w: W, c: Config, u: Tensor, angle: Tensor, seen: Tensor) -> Tensor:
    n, kv, nope, rope = (c[k] for k in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
    a, eps = "layers.0.self_attn.", c["rms_norm_eps"]
    q = rms(u @ w[a + "q_a_proj.weight"].T, w[a + "q_a_layernorm.weight"], eps) @ w[a + "q_b_proj.weight"].T
    q = q.view(len(u), n, nope + rope)
    both = u @ w[a + "kv_a_proj_with_mqa.weight"].T
    latent, key = rms(both[:, :kv], w[a + "kv_a_layernorm.weight"], eps), both[:, kv:]
    expanded = (latent @ w[a + "kv_b_proj.weight"].T).view(len(u), n, nope + c["v_head_dim"])
    q = torch.cat([q[..., :nope], pairs(q[..., nope:], angle)], -1)
    k = torch.cat([expanded[..., :nope], pairs(key[:, None], angle).expand(-1, n, -1)], -1)
    scale = (nope + rope) ** -0.5 * mscale(c["rope_scaling"]["factor"], c["rope_scaling"]["mscale_all_dim"]) ** 2
    return softmaxed(q, k, expanded[..., nope:], scale, seen) @ w[a + "o_proj.weight"].T


def llama(w: W, c: Config, u: Tensor, angle: Tensor, seen: Tensor) -> Tensor:
    a, d = "layers.0.self_attn.", c["head_dim"]
    q, k, v = ((u @ w[f"{a}{x}_proj.weight"].T).view(len(u), -1, d) for x in "qkv")
    group = q.shape[1] // k.shape[1]
    k, v = halves(k, angle).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return softmaxed(halves(q, angle), k, v, d**-0.5, seen) @ w[a + "o_proj.weight"].T


def mlp(w: W, name: str, x: Tensor) -> Tensor:
    gate, up, down = (w[f"{name}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def entered(w: W, c: Config, states: Tensor) -> Tensor:
    """Target states [n, 3 H] -> hidden stream [n, H] of a first pass."""
    if c.get("fc_norm"):
        parts = states.chunk(3, -1)
        states = torch.cat([rms(a, w[f"fc_norm.{i}.weight"], c["rms_norm_eps"]) for i, a in enumerate(parts)], -1)
    return states @ w["fc.weight"].T


def eagle3(
    w: W, c: Config, e: Tensor, h: Tensor, places: Tensor | None = None, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Embeddings of the next tokens and hidden stream at all positions, [n, H] each -> (state, out) [n, H] each."""
    eps = c["rms_norm_eps"]
    places = torch.arange(len(e)) if places is None else places
    seen = torch.ones(len(e), len(e)).tril().bool() if seen is None else seen
    u = torch.cat([rms(e, w["layers.0.input_layernorm.weight"], eps), rms(h, w["layers.0.hidden_norm.weight"], eps)], 1)
    attend, dim = (mla, c["qk_rope_head_dim"]) if "q_lora_rank" in c else (llama, c["head_dim"])
    r = h + attend(w, c, u, angles(c, dim, places), seen)
    pre = r + mlp(w, "layers.0", rms(r, w["layers.0.post_attention_layernorm.weight"], eps))
    out = rms(pre, w["norm.weight"], eps)
    return (out if c.get("norm_output") else pre), out


def dflash(w: W, c: Config, states: Tensor, block: Tensor, causal: bool = False, amplitude: float = 1.0) -> Tensor:
    """States [n, taps H] of all tokens before the block, embeddings [block, H] -> normed rows [block, H]."""
    eps, d, n = c["rms_norm_eps"], c["head_dim"], len(states)
    ctx = rms(states @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    places = torch.arange(n + len(block))
    angle, x = angles(c, d, places), block
    away = places[n:, None] - places
    for i, kind in enumerate(c["layer_types"]):
        p = f"layers.{i}."
        z = rms(x, w[p + "input_layernorm.weight"], eps)
        both = torch.cat([ctx, z])
        k, v = ((both @ w[f"{p}self_attn.{t}_proj.weight"].T).view(n + len(block), -1, d) for t in "kv")
        q = (z @ w[p + "self_attn.q_proj.weight"].T).view(len(block), -1, d)
        q = halves(rms(q, w[p + "self_attn.q_norm.weight"], eps), angle[n:], amplitude)
        k = halves(rms(k, w[p + "self_attn.k_norm.weight"], eps), angle, amplitude)
        group = q.shape[1] // k.shape[1]
        seen = torch.ones_like(away, dtype=torch.bool)
        if kind == "sliding_attention":
            seen = away.abs() < c["sliding_window"]
        if causal:
            seen = seen & (away >= 0)
        y = softmaxed(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), d**-0.5, seen)
        x = x + y @ w[p + "self_attn.o_proj.weight"].T
        x = x + mlp(w, f"layers.{i}", rms(x, w[p + "post_attention_layernorm.weight"], eps))
    return rms(x, w["norm.weight"], eps)
