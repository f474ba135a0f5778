"""Causal attention of compiled blocks on a GPU: one operation from a product's output to the next product's input.

It rotates queries and keys itself, so backward keeps one copy of queries, keys and values, and their gradient is one
tensor, already rotated back.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from andon.model.llama import attend, rotate
from andon.model.shape import Shape

LARGEST_OFFSET: Final = 1 << 31
"""The kernels count the elements of a window in 32 bits."""
HEAD_SIZES: Final = (16, 32, 64)
"""Larger heads are left to torch: with 128, the kernels take twice the time for the same work."""
MOST_PROGRAMS: Final = (1 << 16) - 1
"""The most heads of all windows of a batch: one dimension of the grid."""


def fits_kernels(shape: Shape, compute: torch.dtype) -> bool:
    """Whether the kernels support a model; torch's attention supports all."""
    if compute != torch.bfloat16 or shape.head_dim not in HEAD_SIZES:
        return False
    from andon.model.gpu.attention_kernel import BLOCK  # needs triton

    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return shape.context % BLOCK.value == 0 and shape.context * width < LARGEST_OFFSET


def attend_by_kernels(heads: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
    """Causal attention with rotary positions: queries, keys and values side by side (B T H+2K D) to B T H D."""
    if heads.shape[0] * heads.shape[2] > MOST_PROGRAMS:
        return attend_by_torch(heads, cos, sin, kv_heads)
    return _Attention.apply(heads, cos, sin, kv_heads)  # type: ignore[no-untyped-call, no-any-return]


def attend_by_torch(heads: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
    """The same by torch, which is deterministic if its algorithms must be."""
    q, k, v = torch.split(heads, [heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
    q, k, v = (each.transpose(1, 2) for each in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    if q.dtype == torch.float32:  # torch's kernel for f32 takes no shared keys, and without it all scores are in memory
        return attend(q, k, v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
        rotated, out, sums = torch.ops.andon.attention(heads, cos, sin, kv_heads)
        ctx.kv_heads = kv_heads
        ctx.save_for_backward(rotated, out, sums, cos, sin)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.andon.attention_backward(gradient, *ctx.saved_tensors, ctx.kv_heads), None, None, None


@torch.library.custom_op("andon::attention", mutates_args=())
def _forward(heads: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    from andon.model.gpu.attention_kernel import forward  # needs triton

    return forward(heads.contiguous(), cos, sin, kv_heads)


@_forward.register_fake
def _(heads: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, width, size = heads.shape
    count = width - 2 * kv_heads
    sums = heads.new_empty(batch, count, length, dtype=torch.float32)
    return heads.new_empty(heads.shape), heads.new_empty(batch, length, count, size), sums


@torch.library.custom_op("andon::attention_backward", mutates_args=())
def _backward(
    gradient: Tensor, rotated: Tensor, out: Tensor, sums: Tensor, cos: Tensor, sin: Tensor, kv_heads: int
) -> Tensor:
    from andon.model.gpu.attention_kernel import backward

    return backward(gradient.contiguous(), rotated, out, sums, (cos, sin), kv_heads)


@_backward.register_fake
def _(gradient: Tensor, rotated: Tensor, out: Tensor, sums: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> Tensor:
    return rotated.new_empty(rotated.shape)
