"""Where a layer may write the gradient of a weight instead of into fresh memory: the weight's `grad_out`.

The engine sets it before each backward (`andon.engine.gradients.arena.set_grad_out`). It is used once per backward, so
that autograd still sums the gradients of a weight that is used twice.
"""

import torch
from torch import Tensor


def has_grad_out(weight: Tensor) -> bool:
    """Whether the engine may set a `grad_out`. The compiler must not see it: it would compile again at each change."""
    return not torch.compiler.is_compiling() and hasattr(weight, "grad_out")


def take_grad_out(weight: Tensor) -> Tensor | None:
    """A weight's `grad_out`, once. Backward returns it detached, so that autograd keeps it without a copy."""
    out: Tensor | None = getattr(weight, "grad_out", None)
    weight.grad_out = None  # type: ignore[attr-defined]
    return out
