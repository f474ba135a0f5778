"""A model whose blocks are compiled in stacks of a few; all stacks share one graph, for whole windows.

torch's compiler takes seconds and 70 MB to load, so this module is imported only where something is compiled.
"""

from functools import partial
from typing import Final

import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor

from andon.model.gpu.attention import attend_by_kernels, attend_by_torch, fits_kernels
from andon.model.gpu.products import gated_products, product
from andon.model.llama import Attention, Kernels, Llama, Stack, SwiGLU
from andon.model.shape import CHEAP

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
        kernels = _kernels(model, again=activation_memory < 1)
        for module in model.modules():
            if isinstance(module, Attention | SwiGLU):
                module.kernels = kernels
    blocks = list(model.model.layers)
    count = next(count for count in range(min(TOGETHER, len(blocks)), 0, -1) if len(blocks) % count == 0)
    model.stacks = [Stack(blocks[first : first + count]) for first in range(0, len(blocks), count)]
    for part in (*model.stacks, model.model.norm):
        part.compile(fullgraph=True, dynamic=False)


def _kernels(model: Llama, again: bool) -> Kernels:
    """The functions of compiled blocks; with `again`, backward also recomputes the gated product."""
    attention = attend_by_kernels if fits_kernels(model.shape, model.compute) else attend_by_torch
    if model.compute == torch.float32 or next(model.parameters()).dtype != torch.float32:
        return Kernels(attention, _product, _gated)

    return Kernels(attention, product, partial(gated_products, again=again))


def _product(x: Tensor, *weights: Tensor) -> Tensor:
    return F.linear(x, torch.cat([weight.to(x.dtype) for weight in weights]))


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return _product(F.silu(_product(x, gate)) * _product(x, up), down)
