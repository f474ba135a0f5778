"""A linear layer that can write the gradient of its weight where it is wanted.

Autograd puts each gradient into fresh memory, from which it is then copied into the arena: two more passes
over memory, which at small batches cost as much as the product itself. A weight that has a `gradient_room`
(see `andon.arena.give_room`) gets its gradient written there by the product. The room is used once per
backward, so that a weight used twice is still summed by autograd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Linear(nn.Linear):
    """`nn.Linear` without a bias, whose weight's gradient goes straight into the weight's room."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        roomless = not hasattr(self.weight, "gradient_room")
        if roomless or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight)
        out: Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        for_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_x, None
        room: Tensor | None = getattr(weight, "gradient_room", None)
        weight.gradient_room = None
        inputs = x.reshape(-1, x.shape[-1])
        if room is None:
            return for_x, rows.t() @ inputs
        torch.mm(rows.t(), inputs, out=room)
        return for_x, room.detach()  # a tensor of its own, so that autograd takes it and does not copy it
