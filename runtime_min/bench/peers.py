"""Other implementations of the same ops, to time beside ours: torch's own, and Humming's W4A16 experts if installed."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime_min.kernels.cases import Case
from runtime_min.kernels.linear.launch import library, library_heads
from runtime_min.kernels.mla_prefill.launch import expand
from runtime_min.kernels.moe_route.ref import Routing
from runtime_min.kernels.silu_mul import ref as silu_mul
from specs.errors import InputError

Call = Callable[..., Any]


class PeerError(InputError):
    """A peer that was asked for is not here."""


class Peer(Protocol):
    def __call__(self, case: Case) -> Call | None:
        """The same call, or None if the peer has no such op."""


def peer(name: str) -> Peer:
    """A peer by name; PeerError if it is unknown or not installed."""
    if name == "torch":
        return torch_peer
    if name == "humming":
        try:
            return Humming()
        except ImportError as e:
            raise PeerError(f"--peer humming: {e}; pip install humming-kernels==0.1.20") from e
    raise PeerError(f"--peer {name}: known are torch, humming")


def torch_peer(case: Case) -> Call | None:
    """torch's own kernels, in as few calls as torch offers."""
    calls: dict[str, Call] = {
        "linear": lambda x, w, out=None: library(x, w, out or x.dtype),
        "norm_linear": lambda x, g, eps, w, out=None: library(F.rms_norm(x, g.shape, g, eps), w, out or x.dtype),
        "silu_linear": lambda x, w: library(silu_mul.silu_mul(x).to(w.dtype), w, w.dtype),
        "heads_linear": library_heads,
        "rmsnorm": lambda x, g, eps: F.rms_norm(x, g.shape, g, eps),
        "mla_prefill": _prefill,
    }
    return calls.get(case.op)


def _prefill(
    q_nope: Tensor, q_pe: Tensor, w_uk: Tensor, w_uv: Tensor, rows: Tensor, pages: Tensor, cu_q: Tensor,
    lengths: Tensor, page_tokens: int, scale: float, bounds: Any,
) -> Tensor:  # fmt: skip
    """Expanded keys and values through scaled_dot_product_attention; one sequence without a past."""
    length, heads = bounds[1][0], q_nope.shape[1]
    cached = rows.view(-1, page_tokens, rows.shape[1])[pages[0].long()].flatten(0, 1)[:length]
    keys, values = expand(cached, w_uk, w_uv)
    k = torch.cat([keys, cached[:, None, w_uk.shape[2] :].expand(-1, heads, -1)], -1)
    q = torch.cat([q_nope, q_pe], -1)
    q, k, values = (t.transpose(0, 1)[None] for t in (q, k, values))
    return F.scaled_dot_product_attention(q, k, values, is_causal=True, scale=scale)[0].transpose(0, 1)


class Humming:
    """humming-kernels' indexed grouped products with its own heuristics, on random weights of the same shape.

    Its tables of routes are made beforehand, and what lies between and after its two products (SiLU-mul, the weighted
    sum) is not in the package: neither is timed, which is to its advantage.
    """

    def __init__(self) -> None:
        from humming.layer import HummingLayer
        from humming.tune import get_heuristics_config

        self.layer, self.heuristics = HummingLayer, get_heuristics_config
        self.made: dict[tuple[int, int, int], Any] = {}

    def __call__(self, case: Case) -> Call | None:
        if case.op != "moe_int4":
            return None
        x, gate_up, _, routing, first, shape = case.args[:6]
        here = len(gate_up)
        sizes = ((2 * shape.width, shape.hidden), (shape.hidden, shape.width))
        layers = [self._layer(here, n, k) for n, k in sizes]
        tokens, top_k = routing.ids.shape
        routes = tokens * top_k
        local = max(1, routes * here // max(here, int(routing.ids.max()) + 1))
        device = torch.device("cuda", 0)
        configs = [
            dict(self.heuristics(layer.humming_config, shape_m=local, gemm_type="indexed", device=device))
            for layer in layers
        ]
        tables: dict[int, Any] = {}
        widths = (2 * shape.width, shape.width, shape.hidden)
        both, h, y = (torch.zeros(routes, n, dtype=x.dtype, device=x.device) for n in widths)

        def call(x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing, *_: Any) -> Tensor:
            key = routing.ids.data_ptr()
            if key not in tables:
                local = torch.where((routing.ids >= first) & (routing.ids < first + here), routing.ids - first, -1)
                tables[key] = [aligned(local, here, c["block_shape"][0]) for c in configs]
            ways = ((x, both, top_k), (h, y, 1))
            for layer, config, table, (source, target, share) in zip(layers, configs, tables[key], ways, strict=True):
                layer(
                    inputs=source, outputs=target, sorted_ids=table[0], expert_ids=table[1], num_tokens_padded=table[2],
                    top_k=share, compute_config={"gemm_type": "indexed"}, tuning_config=config,
                )  # fmt: skip
            return y

        return call

    def _layer(self, experts: int, n: int, k: int) -> Any:
        if (experts, n, k) not in self.made:
            words = torch.randint(-(2**31), 2**31 - 1, (experts, n, k // 8), dtype=torch.int32, device="cuda")
            scales = torch.full((experts, n, k // 32), 2.0**-9, dtype=torch.bfloat16, device="cuda")
            with torch.device("cuda"):
                layer = self.layer(
                    shape_n=n, shape_k=k, weight_config={"dtype": "int4", "group_size": 32}, num_experts=experts,
                    torch_dtype=torch.bfloat16,
                )  # fmt: skip
            layer = layer.to("cuda")
            layer.load_from_tensors({"weight": words, "weight_scale": scales})
            layer.transform()
            self.made[experts, n, k] = layer
        return self.made[experts, n, k]


def aligned(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Routes by expert padded to blocks, whose a block is, and how many places are filled; ids below 0 are left out."""
    flat = ids.reshape(-1).cpu()
    order: list[int] = []
    owners: list[int] = []
    for e in range(experts):
        mine = (flat == e).nonzero()[:, 0].tolist()
        blocks = -(-len(mine) // block)
        order += mine + [flat.numel()] * (blocks * block - len(mine))
        owners += [e] * blocks
    tables = (torch.tensor(t, dtype=torch.int32, device=ids.device) for t in (order or [flat.numel()], owners or [-1]))
    filled = torch.tensor([len(order)], dtype=torch.int32, device=ids.device)
    return next(tables), next(tables), filled
