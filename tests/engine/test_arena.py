"""The arena and what lives on it: layout, AdamW against torch's own, gradients folded over slots."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from andon.engine.gradients.arena import CELL, Arena, backward_order
from andon.engine.gradients.order import middle
from andon.engine.optimizer import AdamW
from andon.engine.parallel import DataParallel
from andon.model.llama import Llama
from andon.model.shape import Shape
from andon.optim.adamw import AdamWRule
from andon.transport.local import LocalGroup

SHAPE = Shape(vocab=50, hidden=16, layers=3, heads=2, kv_heads=1, intermediate=24, context=12)


def make() -> Llama:
    model = Llama(SHAPE)
    model.initialise(1)
    return model


def batch(slot: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, SHAPE.vocab, (2, 13), generator=torch.Generator().manual_seed(slot))
    return drawn[:, :-1], drawn[:, 1:]


def test_units_lie_in_the_order_in_which_backward_finishes_them() -> None:
    arena = Arena(make())
    names = [unit.name for unit in arena.layout.units]
    layers = [f"model.layers.{index}" for index in (2, 1, 0)]
    assert names == ["lm_head", "model.norm", *layers, "model.embed_tokens"]
    assert len(arena.layout.units[2].slices) == 9


def test_units_start_on_cells_and_tensors_on_64_bytes_and_nothing_overlaps() -> None:
    arena = Arena(make())
    end = 0
    for unit in arena.layout.units:
        assert unit.start == end and unit.start % CELL == 0
        end = unit.stop
        at = unit.start
        for piece in unit.slices:
            assert piece.start % 16 == 0 and piece.start >= at
            assert (piece.start < unit.vectors) == (len(piece.shape) > 1)
            at = piece.stop
        assert at <= unit.stop
    assert end == arena.layout.size


def test_tensors_whose_sizes_do_not_divide_begin_on_64_bytes_all_the_same() -> None:
    arena = Arena(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)))
    places = {name: piece.start for name, piece in arena.layout.slices.items()}
    # Both layers are one unit: the last layer's matrix of 35 takes 48 places, then come the other one and the vectors.
    assert places == {"1.weight": 0, "0.weight": 48, "1.bias": 64, "0.bias": 80}


def test_parameters_are_views_into_the_weights() -> None:
    model = make()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    arena = Arena(model)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    arena.weights.zero_()
    assert all(not value.any() for value in model.parameters())


def test_a_module_without_blocks_has_units_of_some_size_and_frozen_parameters_stay_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2**17), nn.Linear(2**17, 1))
    model[0].bias.requires_grad = False
    assert [(name, [key for key, _ in found]) for name, found in backward_order(model)] == [
        ("4 to 3", ["4.weight", "4.bias", "3.weight", "3.bias"]),
        ("2 to 0", ["2.weight", "2.bias", "0.weight"]),
    ]


def test_adamw_on_the_arena_is_torchs_adamw_bit_for_bit() -> None:
    model = make()
    arena = Arena(model)
    ours = AdamWRule(arena, [(0, arena.layout.size)])
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in model.named_parameters()}
    matrices = [value for value in copies.values() if value.dim() > 1]
    vectors = [value for value in copies.values() if value.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    generator = torch.Generator().manual_seed(2)
    for step in range(1, 6):
        drawn = torch.randn(arena.layout.size, generator=generator)
        for name, copy in copies.items():
            copy.grad = arena.layout.view(drawn, name) / 513.7
        for group in theirs.param_groups:
            group["lr"] = 1e-3 / step
        theirs.step()
        ours.update(drawn, 513.7, {"lr": 1e-3 / step, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1})
        assert all(torch.equal(value, copies[name]) for name, value in model.named_parameters()), step


def make_optimizer(model: nn.Module, slots: int) -> AdamW:
    """An optimizer that stops before every update, so that the gradients can be looked at."""
    optimizer = AdamW(DataParallel(model, LocalGroup(), slots), lr=0.1)
    optimizer.judge = lambda step, totals: False
    return optimizer


def plain_gradient(model: Llama, slot: int) -> dict[str, Tensor]:
    model.zero_grad()
    model(*batch(slot)).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def tree(model: Llama, lo: int, hi: int) -> dict[str, Tensor]:
    if hi - lo == 1:
        return plain_gradient(model, lo)
    mid = middle(lo, hi)
    left, right = tree(model, lo, mid), tree(model, mid, hi)
    return {name: left[name] + right[name] for name in left}


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
def test_gradients_over_slots_are_the_tree_sum_bit_for_bit(slots: int) -> None:
    expected = tree(make(), 0, slots)
    model = make()
    optimizer = make_optimizer(model, slots)
    for _ in range(2):  # the second round must not see the first
        for slot in optimizer.model.slots:
            x, y = batch(slot)
            optimizer.model.backward(model(x, y), y.numel(), reduction="sum")
        totals = optimizer.step()
        assert totals.tokens == slots * 24 and totals.sound
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and torch.equal(parameter.grad, expected[name]), name
    norm = torch.cat([value.flatten() for value in expected.values()]).double().norm() / totals.tokens
    assert totals.norm == pytest.approx(norm.item(), rel=1e-5)
    optimizer.model.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("andon-exchange")]


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    used, unused = nn.Linear(3, 4), nn.Linear(4, 2)
    model = nn.Sequential(used, unused)
    optimizer = make_optimizer(model, slots=2)
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    for _ in range(2):
        optimizer.model.backward(used(torch.ones(1, 3)).sum(), 1)
    optimizer.step()
    assert used.weight.grad is not None and used.weight.grad.eq(2).all()
    assert unused.weight.grad is not None and unused.weight.grad.eq(0).all()
    optimizer.model.close()


def test_the_norm_of_cells_does_not_depend_on_how_they_are_shared_out() -> None:
    cells = torch.randn(301, CELL, generator=torch.Generator().manual_seed(1)) * 1e3
    whole = torch.linalg.vector_norm(cells, dim=1)
    for parts in (1, 2, 3, 7, 301):
        pieces = [torch.linalg.vector_norm(piece, dim=1) for piece in cells.tensor_split(parts)]
        assert torch.equal(torch.cat(pieces), whole)
