"""A model whose blocks are compiled: all of them share one graph for each shape of their inputs.

On a GPU attention is then FlexAttention, whose backward adds in a fixed order: it is deterministic, and faster there
than the deterministic kernel behind `scaled_dot_product_attention`. torch's compiler takes seconds and 70 MB to load,
so this is imported only where something is compiled.
"""

from typing import Any, Final

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from andon.model.llama import Attention, Block, Llama
from andon.model.loss import loss_of_chunk

KERNEL_OPTIONS: Final[Any] = {
    # No row is masked out as a whole, and a mask's blocks follow each other.
    **{"PRESCALE_QK": True, "ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True},
    # Measured on an H200 with heads of 64.
    **{"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32},
    **{"bwd_num_warps": 4, "bwd_num_stages": 3},
}


def compile_model(model: Llama, deterministic: bool = True, activation_memory: float = 1.0) -> None:
    """Compile the blocks and the loss; whole windows have always the same shape.

    Of a block's activations backward keeps the share `activation_memory`, and computes the others again."""
    # Otherwise kernels are chosen by how fast they run now, and with them the order in which they add.
    torch._inductor.config.deterministic = deterministic
    torch._functorch.config.activation_memory_budget = activation_memory
    device = model.cos.device
    if device.type == "cuda" and deterministic:
        context = model.shape.context
        mask = create_block_mask(_causal, None, None, context, context, device=device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=KERNEL_OPTIONS)

        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = attend
    for block in model.model.layers:
        assert isinstance(block, Block)
        block.compile(fullgraph=True, dynamic=False)
    model.compiled = True
    model.lm_head.loss_of_chunk = torch.compile(loss_of_chunk, fullgraph=True, dynamic=False)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
