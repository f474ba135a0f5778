"""`grad_out` of a weight: where a layer may write the weight's gradient, instead of into new memory.

The engine sets it before each backward (`andon.engine.gradients.arena.set_grad_out`). It is taken once per backward, so
that autograd still sums the gradients of a weight that is used twice.
"""

import torch
from torch import Tensor


def has_grad_out(weight: Tensor) -> bool:
    """Whether the engine sets `grad_out`. Hidden from the compiler, which would compile again at each change."""
    return not torch.compiler.is_compiling() and hasattr(weight, "grad_out")


def take_grad_out(weight: Tensor) -> Tensor | None:
    """Take a weight's `grad_out`, once. Backward returns it detached, so that autograd keeps it without a copy."""
    out: Tensor | None = getattr(weight, "grad_out", None)
    weight.grad_out = None  # type: ignore[attr-defined]
    return out
