"""Drafts of weights made in memory, cut for every rank, beside a target of which there is no more than they use."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime_min.artifact import Stored
from runtime_min.drafts.open import Draft, made
from runtime_min.kv import Batch, LatentCache, batch
from runtime_min.models.decoder import Settings
from runtime_min.ops import REF, Ops
from runtime_min.pages import Sequence
from runtime_min.ranks import Ranks
from specs.draft import read_draft_config
from tests.draft_statement import Config, W

VOCAB = 120
POSITIONS = 256


@dataclass
class Dims:
    vocab: int = VOCAB


class Target:
    """What a draft takes of its target."""

    def __init__(self, ranks: Ranks, head: Tensor, dtype: torch.dtype, ops: Ops) -> None:
        self.ranks, self.ops, self.dims = ranks, ops, Dims()
        self.settings = Settings(dtype=dtype, device=torch.device("cpu"), positions=POSITIONS)
        self.cos = torch.zeros(POSITIONS, 1)
        self.head = head.chunk(ranks.mesh.tp)[ranks.rank % ranks.mesh.tp].to(dtype)


def stored(w: W, c: Config, tp: int, place: int) -> W:
    """A file's tensors as the artifact of rank `place` names, cuts and joins them."""

    def rows(name: str, head: int = 1) -> Tensor:
        return w[f"{name}.weight"].unflatten(0, (-1, head)).chunk(tp)[place].flatten(0, 1)

    def columns(name: str, head: int = 1) -> Tensor:
        return w[f"{name}.weight"].unflatten(1, (-1, head)).chunk(tp, 1)[place]

    out = {n: w[f"{n}.weight"] for n in ("fc", "norm")}
    flash, d = "dflash_config" in c, c.get("head_dim", 1)
    out |= {"hidden_norm": w["hidden_norm.weight" if flash else "layers.0.hidden_norm.weight"]}
    out |= {f"fc_norms.{i}": w[f"fc_norm.{i}.weight"] for i in range(3) if c.get("fc_norm")}
    out |= {"d2t": w["d2t"]} if "d2t" in w else {}
    out |= {"head": rows("lm_head")} if "lm_head.weight" in w else {}
    for i in range(c["num_hidden_layers"]):
        n, to = f"layers.{i}.", f"layers.{i}." if flash else ""
        out[to + ("input_norm" if flash else "embed_norm")] = w[n + "input_layernorm.weight"]
        out[to + "ffn_norm"] = w[n + "post_attention_layernorm.weight"]
        out[to + "mlp.gate_up"] = torch.cat([rows(n + "mlp.gate_proj"), rows(n + "mlp.up_proj")])
        out[to + "mlp.down"] = columns(n + "mlp.down_proj").flatten(1)
        a = n + "self_attn."
        if "q_lora_rank" in c:
            nope, v = c["qk_nope_head_dim"], c["v_head_dim"]
            kv_b = rows(a + "kv_b_proj", nope + v).unflatten(0, (-1, nope + v))
            head = nope + c["qk_rope_head_dim"]
            out |= {
                "attn.qkv_a": torch.cat([w[a + "q_a_proj.weight"], w[a + "kv_a_proj_with_mqa.weight"]]),
                "attn.q_a_norm": w[a + "q_a_layernorm.weight"], "attn.kv_a_norm": w[a + "kv_a_layernorm.weight"],
                "attn.q_b": rows(a + "q_b_proj", head).unflatten(0, (-1, head)),
                "attn.w_uk": kv_b[:, :nope].contiguous(), "attn.w_uv": kv_b[:, nope:].contiguous(),
                "attn.o": columns(a + "o_proj", v).contiguous(),
            }  # fmt: skip
            continue
        q, k, v = (rows(f"{a}{x}_proj", d) for x in "qkv")
        out[to + "attn.o"] = columns(a + "o_proj", d).contiguous()
        joined = {"attn.q": q, "attn.kv": torch.cat([k, v])} if flash else {"attn.qkv": torch.cat([q, k, v])}
        out |= {to + name: x for name, x in joined.items()}
        if flash:
            out |= {f"{to}attn.{x}": w[f"{a}{x}.weight"] for x in ("q_norm", "k_norm")}
    return out


def opened(
    w: W, c: Config, head: Tensor, ranks: Ranks, dtype: torch.dtype = torch.float32, ops: Ops = REF, **changes: Any
) -> Draft:
    """One rank's draft. head [VOCAB, hidden]: the target's."""
    mesh = ranks.mesh
    mine = stored(w, c, mesh.tp, ranks.rank % mesh.tp)
    kept = {
        n: Stored(x.to(dtype) if x.is_floating_point() else x, "plain.v1", {}, (tuple(x.shape),))
        for n, x in mine.items()
    }
    dims = replace(read_draft_config(c, 5), **changes)
    target: Any = Target(ranks, head, dtype, ops)
    return made(dims, kept, target)


class Feed:
    """Sequences over one target cache, whose pages the draft shares; batches of any of their next tokens."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.cache = LatentCache(1, 1024, 8, dtype, torch.device("cpu"), 16)
        # Pages in an order that is not theirs.
        self.cache.pool.free = self.cache.pool.free[::2] + self.cache.pool.free[1::2]
        self.sequences = [Sequence() for _ in range(count)]

    def step(self, counts: dict[int, int], padding: int = 0, **how: Any) -> Batch:
        """The next counts[i] tokens of sequence i."""
        return batch(self.cache, [(self.sequences[i], [0] * n) for i, n in counts.items()], padding=padding, **how)
