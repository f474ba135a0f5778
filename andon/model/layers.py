"""Layers that can write the gradient of their weight where it is wanted.

Autograd puts each gradient into fresh memory, from which it is then copied into the arena: more passes over
memory than the product itself needs at small batches. A weight that has a `grad_out` (see
`andon.engine.arena.set_grad_out`) gets its gradient written there. The room is used once per backward, so
that a weight used twice is still summed by autograd.

A weight held in bf16 is computed with in f32 (under autocast as autocast wants it), and its gradient is f32
where the parameter allows it (`grad_dtype`). Products make the f32 copy anew in backward: kept, all of them
together would be the f32 weights again.
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
        if not _has_grad_out(self.weight):
            autocast = torch.is_autocast_enabled(x.device.type)
            return F.linear(x, self.weight if autocast else full(self.weight))
        out: Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class Embedding(nn.Embedding):
    """`nn.Embedding`, whose weight's gradient goes straight into the weight's room."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32 and not _has_grad_out(self.weight):
            return F.embedding(tokens, self.weight)
        out: Tensor = _Lookup.apply(tokens, self.weight)  # type: ignore[no-untyped-call]
        return out


def full(weight: Tensor) -> Tensor:
    """A weight in f32."""
    if weight.dtype == torch.float32:
        return weight
    if torch.compiler.is_compiling():
        return weight.float()
    out: Tensor = _Full.apply(weight)  # type: ignore[no-untyped-call]
    return out


class _Full(torch.autograd.Function):
    """To f32, with a gradient that is not rounded on its way back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.float())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        for_x = (rows @ weight.float()).view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_x, None
        inputs, room = x.reshape(-1, x.shape[-1]), _take_grad_out(weight)
        if room is None:
            return for_x, rows.t() @ inputs
        return for_x, torch.mm(rows.t(), inputs, out=room).detach()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.embedding(tokens, weight).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None
        room = _take_grad_out(weight)
        total = torch.zeros_like(weight, dtype=torch.float32) if room is None else room.zero_()
        total.index_add_(0, tokens.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        return None, total.detach()


def _has_grad_out(weight: Tensor) -> bool:
    plain = torch.compiler.is_compiling() or torch.is_autocast_enabled(weight.device.type)
    return hasattr(weight, "grad_out") and not plain


def _take_grad_out(weight: Tensor) -> Tensor | None:
    """The room of a weight, once. What is put there is given to autograd detached: as a tensor of its own,
    which autograd keeps instead of copying it."""
    room: Tensor | None = getattr(weight, "grad_out", None)
    weight.grad_out = None  # type: ignore[attr-defined]
    return room
