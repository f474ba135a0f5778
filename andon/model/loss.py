"""The loss of a large vocabulary in chunks, so that the logits of all tokens are never in memory at the same time.

Forward also computes the gradients, while a chunk's logits are in memory, so that backward does not compute the logits
again. Products are bf16, and sums over tokens are f32.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from andon.model.grad_out import take_grad_out
from andon.model.shape import LOGITS_BYTES

IGNORED: Final = -100
"""A target that does not count."""


def loss_of_chunk(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross entropy of some tokens, and its gradient with respect to the logits."""
    logits = x @ weight.t()
    if logits.is_cuda:
        from andon.model.gpu.loss_kernel import turn_into_gradient  # needs triton

        return turn_into_gradient(logits, targets, IGNORED).sum(), logits
    exact = logits.float()
    scale = exact.logsumexp(-1, keepdim=True)
    counts = (targets != IGNORED)[:, None]
    chosen = exact.gather(1, targets.clamp(min=0)[:, None])
    right = torch.arange(weight.shape[0]) == targets[:, None]
    gradient = ((exact - scale).exp() - right.float()) * counts
    return ((scale - chosen) * counts).sum(), gradient.to(x.dtype)


class SummedLoss(torch.autograd.Function):
    """The summed cross entropy of bf16 inputs (tokens × hidden) under a head's weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        held = weight.to(x.dtype)
        rows = max(1, LOGITS_BYTES // (2 * weight.shape[0]))
        total = torch.zeros((), device=x.device)
        for_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        for_weight = None
        for start in range(0, len(x), rows):
            inputs = x[start : start + rows]
            loss, gradient = loss_of_chunk(inputs, held, targets[start : start + rows])
            total += loss
            if for_x is not None:
                torch.mm(gradient, held, out=for_x[start : start + rows])
            if ctx.needs_input_grad[1]:
                for_weight = product_added_to(for_weight, gradient.t(), inputs)
        ctx.save_for_backward(for_x, for_weight, weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        for_x, for_weight, weight = ctx.saved_tensors
        for_x = None if for_x is None else for_x * gradient.to(for_x.dtype)
        if for_weight is None:
            return for_x, None, None
        return for_x, torch.mul(for_weight, gradient, out=take_grad_out(weight)).detach(), None


def product_added_to(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """The product of bf16 matrices, added to the f32 total if there is one."""
    if total is None:
        return product_f32(a, b)
    if a.device.type == "cuda":
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(product_f32(a, b))


def product_f32(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of bf16 matrices, in f32."""
    if a.device.type != "cuda":
        return torch.mm(a.float(), b.float()) if out is None else torch.mm(a.float(), b.float(), out=out)
    if out is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)
