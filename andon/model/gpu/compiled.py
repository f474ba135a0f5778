"""A model whose blocks are compiled in stacks of a few; all stacks share one graph, for whole windows.

On a GPU attention is FlexAttention, whose backward adds in a fixed order: it is deterministic, and faster than the
deterministic kernel of `scaled_dot_product_attention`. If bits may vary, `scaled_dot_product_attention` is faster.
torch's compiler takes seconds and 70 MB to load, so this module is imported only where something is compiled.
"""

from functools import partial
from typing import Any, Final

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from andon.model.gpu.products import gated_products, product
from andon.model.llama import Attend, Attention, Kernels, Llama, Stack, SwiGLU
from andon.model.shape import CHEAP

KERNEL_OPTIONS: Final[Any] = {"PRESCALE_QK": True, "ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}
"""No row is fully masked, and a mask's blocks are contiguous."""
HOPPER_OPTIONS: Final[Any] = {
    **{"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32},
    **{"bwd_num_warps": 4, "bwd_num_stages": 3},
}
"""The fastest on an H200 with heads of 64 in bf16 (measured); elsewhere torch chooses."""
SMALLEST_HEAD: Final = 16
"""FlexAttention supports no smaller heads."""

TOGETHER: Final = 8
"""The most blocks in a stack: operations between two blocks are fused, and Python is called less often."""


def compile_model(model: Llama, deterministic: bool = True, activation_memory: float = CHEAP) -> None:
    """Compile blocks and final norm; whole windows always have the same shape.

    On a GPU backward keeps the share `activation_memory` of a stack's activations, and recomputes the others."""
    # Otherwise kernels, and with them the order of addition, are chosen by how fast they run now.
    torch._inductor.config.deterministic = deterministic
    on_gpu = model.cos.device.type == "cuda"
    torch._functorch.config.ban_recompute_materialized_backward = activation_memory == 1 or not on_gpu
    torch._functorch.config.activation_memory_budget = (
        activation_memory if on_gpu and activation_memory < CHEAP else 1.0
    )
    if on_gpu:
        kernels = _kernels(model, deterministic, again=activation_memory < 1)
        for module in model.modules():
            if isinstance(module, Attention | SwiGLU):
                module.kernels = kernels
    blocks = list(model.model.layers)
    count = next(count for count in range(min(TOGETHER, len(blocks)), 0, -1) if len(blocks) % count == 0)
    model.stacks = [Stack(blocks[first : first + count]) for first in range(0, len(blocks), count)]
    for part in (*model.stacks, model.model.norm):
        part.compile(fullgraph=True, dynamic=False)


def _kernels(model: Llama, deterministic: bool, again: bool) -> Kernels:
    """The functions of compiled blocks; with `again`, backward also recomputes the gated product."""
    attend = _deterministic_attention(model) if deterministic else _fastest_attention
    if model.compute == torch.float32 or next(model.parameters()).dtype != torch.float32:
        return Kernels(attend, _product, _gated)

    return Kernels(attend, product, partial(gated_products, again=again))


def _product(x: Tensor, *weights: Tensor) -> Tensor:
    return F.linear(x, torch.cat([weight.to(x.dtype) for weight in weights]))


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return _product(F.silu(_product(x, gate)) * _product(x, up), down)


def _deterministic_attention(model: Llama) -> Attend:
    context, head_dim = model.shape.context, model.shape.head_dim
    if head_dim < SMALLEST_HEAD:
        return _fastest_attention  # torch takes a deterministic one where it must
    measured = head_dim == 64 and model.compute == torch.bfloat16 and torch.cuda.get_device_capability() == (9, 0)
    options = KERNEL_OPTIONS | HOPPER_OPTIONS if measured else KERNEL_OPTIONS
    mask = create_block_mask(_causal, None, None, context, context, device=model.cos.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)

    return attend


def _fastest_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
