"""Layers that can write the gradient of their weight directly into the arena.

Autograd allocates a tensor for each gradient, which is then copied into the arena; for small batches that costs more
memory traffic than the matrix product. If a weight has a `grad_out`, its gradient is written there instead.

A layer computes in the dtype of its inputs. A bf16 weight is converted to f32 for f32 inputs, and its gradient is f32
where the parameter allows it (`grad_dtype`). Backward converts the weight again instead of keeping the copy: the copies
of all layers would take as much memory as f32 weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from andon.model.grad_out import has_grad_out, take_grad_out
from andon.model.loss import SummedLoss


class Linear(nn.Linear):
    """`nn.Linear` without a bias; its backward writes into the weight's `grad_out`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.linear(x, self.weight.to(x.dtype))
        if not has_grad_out(self.weight):
            return F.linear(x, as_f32(self.weight))
        return _Product.apply(x, self.weight)  # type: ignore[no-untyped-call, no-any-return]


class Head(Linear):
    """The layer from hidden states to logits; with targets it returns their summed loss."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None or x.dtype == torch.float32:
            logits = super().forward(x)
            if targets is None:
                return logits
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
        rows = x.flatten(0, 1)
        weight = self.weight if torch.is_grad_enabled() else self.weight.detach()  # or its gradient would be computed
        return SummedLoss.apply(rows, weight, targets.flatten())  # type: ignore[no-untyped-call, no-any-return]


class Embedding(nn.Embedding):
    """`nn.Embedding`; its backward writes into the weight's `grad_out`."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32 and not has_grad_out(self.weight):
            return F.embedding(tokens, self.weight)
        return _Lookup.apply(tokens, self.weight)  # type: ignore[no-untyped-call, no-any-return]


def as_f32(weight: Tensor) -> Tensor:
    """A weight in f32; backward does not round its gradient."""
    if weight.dtype == torch.float32:
        return weight
    if torch.compiler.is_compiling():
        return weight.float()
    return _AsF32.apply(weight)  # type: ignore[no-untyped-call, no-any-return]


class _AsF32(torch.autograd.Function):
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
        inputs, out = x.reshape(-1, x.shape[-1]), take_grad_out(weight)
        if out is None:
            return for_x, rows.t() @ inputs
        return for_x, torch.mm(rows.t(), inputs, out=out).detach()


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
        out = take_grad_out(weight)
        total = torch.zeros_like(weight, dtype=torch.float32) if out is None else out.zero_()
        total.index_add_(0, tokens.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        return None, total.detach()
