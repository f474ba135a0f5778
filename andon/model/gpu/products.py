"""bf16 products of compiled blocks on a GPU: a weight's gradient is written once, in f32, directly into the arena.

The compiler's own backward of `F.linear` writes it three times: in bf16 by the product, in f32 by a cast, and again by
the copy into the arena. Weights with the same inputs are one product. So are their gradients, if these are contiguous
in the arena.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from andon.model.grad_out import take_grad_out
from andon.model.loss import product_f32

# The compiler treats these two as opaque.
LIBRARY: Final = torch.library.Library("andon", "DEF")  # type: ignore[no-untyped-call]
for schema in (
    "weight_gradients(Tensor gradient, Tensor inputs, Tensor[] weights) -> Tensor[]",
    "gated_backward(Tensor both, Tensor gradient, bool again) -> (Tensor, Tensor)",
):
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]


def product(x: Tensor, *weights: Tensor) -> Tensor:
    """`F.linear(x, weight)`; for several weights, the outputs side by side."""
    return _Product.apply(x, *weights)  # type: ignore[no-untyped-call, no-any-return]


def gated_products(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, again: bool) -> Tensor:
    """`down(silu(gate(x)) * up(x))`. With `again`, backward recomputes the input of `down` instead of keeping it."""
    return _GatedProducts.apply(x, gate, up, down, again)  # type: ignore[no-untyped-call, no-any-return]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return F.linear(x, _joined(weights, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        rows = _rows(gradient)
        for_x = (rows @ _joined(weights, x.dtype)).view(x.shape)
        return for_x, *torch.ops.andon.weight_gradients(rows, _rows(x), weights)


class _GatedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, again: bool) -> Tensor:
        both = _rows(x) @ _joined((gate, up), x.dtype).t()
        hidden = _gated(both)
        ctx.again = again
        ctx.save_for_backward(x, both, gate, up, down, *(() if again else (hidden,)))
        return (hidden @ down.to(x.dtype).t()).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, both, gate, up, down, *kept = ctx.saved_tensors
        rows = _rows(gradient)
        for_both, computed = torch.ops.andon.gated_backward(both, rows @ down.to(x.dtype), ctx.again)
        (for_down,) = torch.ops.andon.weight_gradients(rows, computed if ctx.again else kept[0], [down])
        for_x = (for_both @ _joined((gate, up), x.dtype)).view(x.shape)
        for_gate, for_up = torch.ops.andon.weight_gradients(for_both, _rows(x), [gate, up])
        return for_x, for_gate, for_up, for_down, None


def _gated(both: Tensor) -> Tensor:
    """`silu(gate) * up`, where gate and up are side by side in each row."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def _joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    converted = [weight.to(dtype) for weight in weights]
    return torch.cat(converted) if len(converted) > 1 else converted[0]


def _are_one_piece(tensors: Sequence[Tensor]) -> bool:
    """Whether these are contiguous in one allocation."""
    storages = {each.untyped_storage().data_ptr() for each in tensors}
    return len(storages) == 1 and all(
        one.data_ptr() + one.nbytes == after.data_ptr() for one, after in pairwise(tensors)
    )


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@torch.library.impl("andon::weight_gradients", "CompositeExplicitAutograd", lib=LIBRARY)
def _weight_gradients(gradient: Tensor, inputs: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The gradients of weights with the same inputs; `gradient` is that of their outputs, side by side."""
    sizes = [len(weight) for weight in weights]
    outs = [out for out in map(take_grad_out, weights) if out is not None]
    if len(outs) < len(weights):
        return [each.clone() for each in torch.split(product_f32(gradient.t(), inputs), sizes)]
    if _are_one_piece(outs):
        product_f32(gradient.t(), inputs, outs[0].as_strided((sum(sizes), inputs.shape[1]), (inputs.shape[1], 1)))
    else:
        for rows, out in zip(torch.split(gradient, sizes, 1), outs, strict=True):
            product_f32(rows.t(), inputs, out)
    return [out.detach() for out in outs]


@torch.library.register_fake("andon::weight_gradients", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _(gradient: Tensor, inputs: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [torch.empty(weight.shape, dtype=torch.float32, device=gradient.device) for weight in weights]


@torch.library.impl("andon::gated_backward", "CompositeExplicitAutograd", lib=LIBRARY)
def _gated_backward(both: Tensor, gradient: Tensor, again: bool) -> tuple[Tensor, Tensor]:
    """The gradient of `both`; and `_gated(both)` with `again`, otherwise an empty tensor.

    A separate kernel: the compiler's reads everything twice, because it writes the two halves of a row as one."""
    for_both, hidden = torch.empty_like(both), torch.empty_like(gradient) if again else gradient.new_empty(0)
    if both.device.type == "cuda":
        from andon.model.gpu.gated_kernel import launch  # needs triton

        launch(both, gradient, for_both, hidden if again else None)
        return for_both, hidden
    gate, up = (each.float() for each in both.chunk(2, -1))
    sigmoid, wanted = gate.sigmoid(), gradient.float()
    for_both[:, : gate.shape[1]] = wanted * up * sigmoid * (1 + gate * (1 - sigmoid))
    for_both[:, gate.shape[1] :] = wanted * gate * sigmoid
    if again:
        hidden.copy_(gate * sigmoid * up)
    return for_both, hidden


@torch.library.register_fake("andon::gated_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _(both: Tensor, gradient: Tensor, again: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(both), torch.empty_like(gradient) if again else gradient.new_empty(0)
