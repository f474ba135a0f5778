"""The numbers of the Python interface are those of plain PyTorch on the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import andon
from andon.transport.local import LocalGroup

COUNTS = [3, 8, 1, 5]  # samples of each slot: a mean of means would be another number
STEPS, LR, CLIP = 4, 0.05, 5.75


class Regression(nn.Module):
    """Two layers, so that there are matrices, which decay, and vectors, which do not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 1)
        chance = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            parameter.data.normal_(0.0, 0.6, generator=chance)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(x)))
        return out


def batch(step: int, slot: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(10 * step + slot)
    x = torch.randn(COUNTS[slot], 4, generator=chance)
    return x, x.sum(1, keepdim=True)


def squared_error(predicted: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(predicted, y)


def plain(module: nn.Module) -> tuple[list[float], list[float]]:
    """The same training in plain PyTorch, each step on its whole batch: losses and norms."""
    matrices = [each for each in module.parameters() if each.dim() > 1]
    vectors = [each for each in module.parameters() if each.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        parts = [batch(step, slot) for slot in range(len(COUNTS))]
        x, y = (torch.cat([part[side] for part in parts]) for side in (0, 1))
        optimizer.zero_grad()
        loss = squared_error(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_slots_of_different_sizes_train_as_one_batch(reduction: str) -> None:
    module = Regression()
    oracle = copy.deepcopy(module)
    losses, norms = plain(oracle)
    assert min(norms) < CLIP < max(norms)  # some steps are clipped, and some are not
    model = andon.DataParallel(module, LocalGroup(), slots=len(COUNTS))
    optimizer = andon.AdamW(model, lr=LR)
    for step in range(STEPS):
        for slot in model.slots:
            x, y = batch(step, slot)
            loss = nn.functional.mse_loss(model(x), y, reduction=reduction)
            model.backward(loss, len(y), reduction)  # type: ignore[arg-type]
        totals = optimizer.step(clip=CLIP)
        assert totals.loss == pytest.approx(losses[step], rel=1e-5)
        assert totals.norm == pytest.approx(norms[step], rel=1e-5)
        assert totals.tokens == sum(COUNTS)
    for ours, theirs in zip(module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    model.close()


def test_a_loss_that_is_not_finite_halts_although_its_gradients_are() -> None:
    module = Regression()
    model = andon.DataParallel(module, LocalGroup(), slots=1)
    optimizer = andon.AdamW(model, lr=LR)
    before = [each.detach().clone() for each in module.parameters()]
    x, y = batch(0, 0)
    model.backward(squared_error(model(x), y) + float("inf"), len(y))
    with pytest.raises(andon.JidokaHalt, match="the loss is inf"):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    model.close()


def test_a_norm_that_overflows_halts_although_every_gradient_is_finite() -> None:
    module = nn.Linear(64, 1, bias=False)
    model = andon.DataParallel(module, LocalGroup(), slots=2)
    optimizer = andon.AdamW(model, lr=LR)
    before = module.weight.detach().clone()
    for _ in model.slots:
        model.backward(model(torch.full((1, 64), 1e30)).sum(), 1)
    with pytest.raises(andon.JidokaHalt, match=r"every contribution is finite, but the norm .* is inf"):
        optimizer.step()
    assert torch.equal(module.weight, before)
    model.close()


def test_without_a_clip_nothing_is_scaled() -> None:
    module = Regression()
    twin = copy.deepcopy(module)
    results = []
    for clip in (0.0, 1e9):
        each = copy.deepcopy(twin)
        model = andon.DataParallel(each, LocalGroup(), slots=1)
        optimizer = andon.AdamW(model, lr=LR)
        x, y = batch(0, 0)
        model.backward(squared_error(model(x), y), len(y))
        optimizer.step(clip=clip)
        results.append([weight.detach().clone() for weight in each.parameters()])
        model.close()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_parameter_that_a_step_does_not_use_has_a_gradient_of_zero() -> None:
    used, unused = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    module = nn.ModuleDict({"used": used, "unused": unused})
    model = andon.DataParallel(module, LocalGroup(), slots=2)
    optimizer = andon.AdamW(model, lr=LR)
    norms = []
    for layers in ([used, unused], [used]):
        for _ in model.slots:
            x = torch.ones(1, 3)
            loss = torch.stack([layer(x).sum() for layer in layers]).sum()
            model.backward(loss, 1)
        norms.append(optimizer.step().norm)
    # Twelve ones for each layer that was used.
    assert norms == pytest.approx([24**0.5, 12**0.5])
    model.close()


def test_a_step_in_which_nothing_counts_leaves_the_weights_finite() -> None:
    model = andon.DataParallel(Regression(), LocalGroup(), slots=1)
    optimizer = andon.AdamW(model, lr=LR)
    x, _ = batch(0, 0)
    model.backward(0 * model(x).sum(), 0, reduction="sum")
    optimizer.step(clip=CLIP)
    assert all(bool(each.isfinite().all()) for each in model.parameters())
    model.close()
