"""Attention within each picture or clip on a GPU: a rotary kernel of ours, then torch's attention.

Head 72 with no mask is what cuDNN is written for; torch's own choice there is a kernel that takes 1.7 times as long.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from runtime_min.kernels.launch import Kernels, Launch, power
from runtime_min.runs import runs

ROPE_ROWS = 32


def vit_attn(kernels: Kernels, qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> Tensor:
    """As in ref.py; qkv is overwritten. One call of torch for each stretch of items of equal length."""
    if not len(qkv):
        return qkv.new_empty(0, *qkv.shape[2:])
    rope(kernels, qkv, cos, sin)
    out = []
    for start, count, length in runs(lengths, int):
        mine = qkv[start : start + count * length].view(count, length, *qkv.shape[1:])
        q, k, v = (x.transpose(1, 2) for x in mine.unbind(2))
        out.append(attend(q, k, v).transpose(1, 2).flatten(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]


def rope(kernels: Kernels, qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates queries and keys of qkv [P, 3, H, D] in place."""
    patches, _, heads, head = qkv.shape
    if not qkv.is_contiguous() or not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError(f"vit_attn: strides {qkv.stride()}, {cos.stride()}, {sin.stride()}; all must be contiguous")
    count = 2 * patches * heads
    constants = {"H": heads, "R": head // 2, "BR": power(head // 2), "ROWS": ROPE_ROWS}
    args = (qkv, cos, sin, count)
    grid = (-(-count // ROPE_ROWS), 1, 1)
    kernels.run(Launch(kernel="vit_attn.rope", grid=grid, args=args, constants=constants, warps=4))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention without a mask, [B, H, L, D]: cuDNN's where it takes these, else what torch picks."""
    if q.is_cuda and can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, False)):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v)
    return scaled_dot_product_attention(q, k, v)
