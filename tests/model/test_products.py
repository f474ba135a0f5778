"""Products of compiled blocks: outputs and gradients are those of PyTorch, and a gradient lands where it belongs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from andon.model import loss as loss_module
from andon.model.gpu.products import gated_products, product
from andon.model.loss import SummedLoss

NO_GPU = "needs a GPU: tests/gpu.sh on a machine that has one"


def matrix(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).div(shape[-1] ** 0.5)


def close(found: Tensor | None, wanted: Tensor | None) -> bool:
    assert found is not None and wanted is not None
    return found.shape == wanted.shape and float((found.detach().float() - wanted).norm() / wanted.norm()) < 0.01


def with_room(*weights: Tensor, apart: bool = False) -> tuple[list[Tensor], Tensor]:
    """Weights as parameters whose gradients belong into one array, side by side or with a gap between them."""
    gap = 16 if apart else 0
    room = torch.full((sum(each.numel() + gap for each in weights),), torch.nan)
    made, start = [], 0
    for each in weights:
        weight = each.clone().requires_grad_()
        weight.grad_out = room[start : start + each.numel()].view(each.shape)  # type: ignore[attr-defined]
        start += each.numel() + gap
        made.append(weight)
    return made, room


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_the_product_of_several_weights_is_that_of_each(count: int, apart: bool) -> None:
    x, plain = matrix(1, 2, 5, 64), [matrix(2 + each, 16 * (1 + each), 64) for each in range(count)]
    weights, room = with_room(*plain, apart=apart)
    inputs, exact = x.bfloat16().requires_grad_(), x.clone().requires_grad_()
    leaves = [each.clone().requires_grad_() for each in plain]
    wanted = torch.cat([F.linear(exact, each) for each in leaves], -1)
    found = product(inputs, *weights)
    back = matrix(9, *wanted.shape)
    torch.autograd.backward([wanted, found], [back, back.bfloat16()])
    assert close(found, wanted) and close(inputs.grad, exact.grad)
    for weight, leaf in zip(weights, leaves, strict=True):
        assert close(weight.grad, leaf.grad) and weight.grad is not None
        assert room.data_ptr() <= weight.grad.data_ptr() < room.data_ptr() + room.nbytes
        assert weight.grad.dtype == torch.float32
    assert int(room.isnan().sum()) == (16 * count if apart else 0)  # nothing else was written


@pytest.mark.parametrize("again", [False, True])
def test_the_gated_products_are_those_of_torch(again: bool) -> None:
    x, plain = matrix(1, 3, 7, 32), [matrix(2, 48, 32), matrix(3, 48, 32), matrix(4, 32, 48)]
    weights, _ = with_room(*plain)
    inputs, exact = x.bfloat16().requires_grad_(), x.clone().requires_grad_()
    gate, up, down = leaves = [each.clone().requires_grad_() for each in plain]
    wanted = F.linear(F.silu(F.linear(exact, gate)) * F.linear(exact, up), down)
    found = gated_products(inputs, weights[0], weights[1], weights[2], again)
    back = matrix(9, *wanted.shape)
    torch.autograd.backward([wanted, found], [back, back.bfloat16()])
    assert close(found, wanted) and close(inputs.grad, exact.grad)
    assert all(close(weight.grad, leaf.grad) for weight, leaf in zip(weights, leaves, strict=True))


def test_without_room_a_gradient_is_a_tensor_of_its_own() -> None:
    weights = [matrix(each, 16, 32).requires_grad_() for each in (1, 2)]
    for _ in range(2):  # autograd adds the second to the first
        torch.autograd.backward(product(matrix(3, 4, 32).bfloat16(), *weights).sum())
    one = matrix(1, 16, 32).requires_grad_()
    torch.autograd.backward(F.linear(matrix(3, 4, 32), one).sum() * 2)
    assert close(weights[0].grad, one.grad)


def test_a_weight_that_is_used_twice_gets_the_sum_of_both_gradients() -> None:
    (weight,), _ = with_room(matrix(1, 16, 32))
    plain = matrix(1, 16, 32).requires_grad_()
    first, second = matrix(2, 4, 32), matrix(3, 4, 32)
    torch.autograd.backward((product(first.bfloat16(), weight) + product(second.bfloat16(), weight)).sum())
    torch.autograd.backward((F.linear(first, plain) + F.linear(second, plain)).sum())
    assert close(weight.grad, plain.grad)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]),
    ],
)
def test_the_loss_in_chunks_is_the_loss_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = torch.randint(1000, (100,), generator=torch.Generator().manual_seed(3)).to(device)
    found = []
    for bytes_of_logits in (1 << 30, 2 * 1000 * 30):
        monkeypatch.setattr(loss_module, "LOGITS_BYTES", bytes_of_logits)
        x, weight = (matrix(seed, rows, 64).to(device) for seed, rows in ((1, 100), (2, 1000)))
        leaves = [x.bfloat16().requires_grad_(), weight.requires_grad_()]
        loss = SummedLoss.apply(*leaves, targets)  # type: ignore[no-untyped-call]
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.002)
    wanted = F.cross_entropy(x @ weight.t(), targets, reduction="sum")
    assert close(found[1][0], wanted)
