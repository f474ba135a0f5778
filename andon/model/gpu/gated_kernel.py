"""The gate's backward on a GPU, in one pass over memory (`products.gated_products`)."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS: Final = 4096  # per program, at most


@triton.jit  # type: ignore[untyped-decorator]
def _backward(both, gradient, for_both, hidden, width, BLOCK: tl.constexpr, AGAIN: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first, second = row * 2 * width + column, row * 2 * width + width + column
    gate = tl.load(both + first, inside).to(tl.float32)
    up = tl.load(both + second, inside).to(tl.float32)
    wanted = tl.load(gradient + row * width + column, inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid  # not rounded, as in the compiler's forward
    tl.store(for_both + first, (wanted * up) * sigmoid * (1 + gate * (1 - sigmoid)), inside)
    tl.store(for_both + second, wanted * silu, inside)
    if AGAIN:
        tl.store(hidden + row * width + column, silu * up, inside)


def launch(both: Tensor, gradient: Tensor, for_both: Tensor, hidden: Tensor | None) -> None:
    """Write the gradient of `both`, and forward's output to `hidden` if it is given."""
    rows, width = gradient.shape
    room = for_both if hidden is None else hidden
    block = min(COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device(both.device):
        _backward[rows, triton.cdiv(width, block)](
            both, gradient, for_both, room, width, BLOCK=block, AGAIN=hidden is not None, num_warps=8
        )
