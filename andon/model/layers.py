"""Layers that can write the gradient of their weight where it is wanted.

Autograd puts each gradient into fresh memory, from which it is then copied into the arena: more passes over
memory than the product itself needs at small batches. A weight that has a `gradient_room` (see
`andon.arena.give_room`) gets its gradient written there. The room is used once per backward, so that a weight
used twice is still summed by autograd.
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
        if not _has_room(self.weight):
            return F.linear(x, self.weight)
        out: Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class Embedding(nn.Embedding):
    """`nn.Embedding`, whose weight's gradient goes straight into the weight's room."""

    def forward(self, tokens: Tensor) -> Tensor:
        if not _has_room(self.weight):
            return F.embedding(tokens, self.weight)
        out: Tensor = _Lookup.apply(tokens, self.weight)  # type: ignore[no-untyped-call]
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
        inputs, room = x.reshape(-1, x.shape[-1]), _take_room(weight)
        if room is None:
            return for_x, rows.t() @ inputs
        return for_x, torch.mm(rows.t(), inputs, out=room).detach()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None
        room = _take_room(weight)
        total = torch.zeros_like(weight) if room is None else room.zero_()
        total.index_add_(0, tokens.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        return None, total.detach()


def _has_room(weight: Tensor) -> bool:
    plain = torch.compiler.is_compiling() or torch.is_autocast_enabled(weight.device.type)
    return hasattr(weight, "gradient_room") and not plain


def _take_room(weight: Tensor) -> Tensor | None:
    """The room of a weight, once. What is put there is given to autograd detached: as a tensor of its own,
    which autograd keeps instead of copying it."""
    room: Tensor | None = getattr(weight, "gradient_room", None)
    weight.gradient_room = None  # type: ignore[attr-defined]
    return room
