"""EAGLE3 drafts for training: several steps at once, each on the states of the step before.

Row p of step j stands for position p + j: it takes token p + 1 + j and the state of row p one step before (the
target's at step 0), sees the step-0 keys of rows 0..p and its own row's keys of steps 1..j, and proposes token
p + 2 + j. At inference the same row would see the same keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from convert.demo.training.drafts import HEAD_DIM, Draft
from convert.demo.training.model import norm
from convert.demo.training.params import Params
from convert.demo.training.rope import rotated, rotated_halves


class Heads(NamedTuple):
    """[B, heads, R, D] each."""

    q: Tensor
    k: Tensor
    v: Tensor


class Unroll:
    """The steps of one batch. `step` gives what the head reads, [B, R, hidden]."""

    def __init__(self, draft: Draft, w: Params, states: Tensor) -> None:
        """states: the target's tapped states [B, R, taps * hidden] of the rows."""
        self.draft, self.w = draft, w
        self.dtype = w["fc"].dtype
        if "fc_norm" in w:
            parts = states.chunk(len(w["fc_norm"]), -1)
            normed = (norm(s, n, draft.eps, self.dtype) for s, n in zip(parts, w["fc_norm"], strict=True))
            states = torch.cat(list(normed), -1)
        self.state = linear(states.to(self.dtype), w["fc"])
        rows = states.shape[1]
        self.hidden_rows = torch.ones(rows, rows, dtype=torch.bool, device=states.device).triu(1)
        self.past: list[Heads] = []

    def step(self, embeds: Tensor) -> Tensor:
        """embeds [B, R, hidden]: the target's embeddings of tokens p + 1 + j."""
        d, w, eps = self.draft, self.w, self.draft.eps
        h = self.state
        u = torch.cat([norm(embeds, w["input_norm"], eps, self.dtype), norm(h, w["hidden_norm"], eps, self.dtype)], -1)
        self.past.append(self._heads(u))
        r = h + linear(self._seen().transpose(1, 2).flatten(2), w["attn.o"])
        x = norm(r, w["ffn_norm"], eps, self.dtype)
        pre = r + linear(silu(linear(x, w["mlp.gate"])) * linear(x, w["mlp.up"]), w["mlp.down"])
        out = norm(pre, w["norm"], eps, self.dtype)
        self.state = out if d.config.get("norm_output") else pre
        return out

    def _heads(self, u: Tensor) -> Heads:
        g, w, (b, r, _) = self.draft.geometry, self.w, u.shape
        first = len(self.past)
        if self.draft.kind == "eagle3_llama":
            table = self.draft.rope.table(HEAD_DIM, r, u.device, first)
            q, k, v = (linear(u, w[f"attn.{m}"]).view(b, r, g.heads, HEAD_DIM) for m in "qkv")
            q, k = rotated_halves(q, table), rotated_halves(k, table)
        else:
            eps, table = self.draft.eps, self.draft.rope.table(g.qk_rope, r, u.device, first)
            q_a = norm(linear(u, w["attn.q_a"]), w["attn.q_a_norm"], eps, self.dtype)
            q = linear(q_a, w["attn.q_b"]).view(b, r, g.heads, -1)
            q_nope, q_pe = torch.split(q, [g.qk_nope, g.qk_rope], -1)
            latent, k_pe = torch.split(linear(u, w["attn.kv_a"]), [g.kv_lora, g.qk_rope], -1)
            latent = norm(latent, w["attn.kv_a_norm"], eps, self.dtype)
            kv = linear(latent, w["attn.kv_b"]).view(b, r, g.heads, -1)
            k_nope, v = torch.split(kv, [g.qk_nope, g.v_head], -1)
            q = torch.cat([q_nope, rotated(q_pe, table)], -1)
            k = torch.cat([k_nope, rotated(k_pe[:, :, None], table).expand(-1, -1, g.heads, -1)], -1)
        return Heads(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    def _seen(self) -> Tensor:
        """Attention of the newest step [B, heads, R, D]."""
        (q, _, _), (_, k, v), own = self.past[-1], self.past[0], self.past[1:]
        g = self.draft.geometry
        llama = self.draft.kind == "eagle3_llama"
        scale = HEAD_DIM**-0.5 if llama else self.draft.rope.softmax_scale(g.qk_nope + g.qk_rope)
        q = q * scale
        scores = (q @ k.mT).masked_fill(self.hidden_rows, -torch.inf)
        ours = [(q * step.k).sum(-1, keepdim=True) for step in own]
        weights = torch.cat([scores, *ours], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        out = weights[..., : k.shape[2]] @ v
        for i, step in enumerate(own):
            out = out + weights[..., k.shape[2] + i, None] * step.v
        return out
