"""One answer for any module: dropout, BatchNorm, frozen parameters, schedulers, other optimizers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, OneCycleLR, ReduceLROnPlateau

import andon
from andon.engine.gradients.arena import Arena
from andon.engine.recovery.transfer import share_buffers
from andon.optim.base import Range, UpdateRule
from andon.run.records.typed_json import from_json, to_json
from andon.transport import base
from andon.transport.base import Group
from andon.transport.local import LocalGroup
from tests.kit.group_harness import World

SLOTS = 6


def network() -> nn.Module:
    torch.manual_seed(3)
    body = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, 3)]
    return nn.Sequential(*body)


def train(group: Group, steps: int = 4) -> tuple[str, list[float]]:
    """The digest of the whole state, BatchNorm's buffers included, and the losses."""
    model = andon.DataParallel(network(), group, SLOTS)
    optimizer = andon.AdamW(model, lr=1e-2)
    losses = []
    for _ in range(steps):
        for slot in model.slots:
            x, y = torch.randn(5 + slot, 1, 8, 8), torch.randint(3, (5 + slot,))
            model.backward(F.cross_entropy(model(x), y), count=len(y))
        losses.append(optimizer.step().loss)
    model.close()
    return andon.digest(model), losses


def test_batch_norm_and_dropout_give_one_digest_for_any_number_of_ranks_and_any_transport() -> None:
    found = []
    for transport, size in (("local", 1), ("shm", 2), ("shm", 3), ("torch", 2), ("star", 3)):
        with World(transport, size) as world:
            found += world.run(train)
    assert all(each == found[0] for each in found), found


def test_slots_and_steps_have_random_numbers_of_their_own() -> None:
    model = andon.DataParallel(nn.Linear(1, 1), LocalGroup(), slots=2)
    optimizer = andon.AdamW(model)
    drawn = []
    for _ in range(2):
        for _ in model.slots:
            drawn.append((random.random(), float(np.random.rand()), torch.rand(1).item()))
            model.backward(model(torch.ones(1, 1)).sum(), count=1)
        optimizer.step()
    assert all(len(set(column)) == 4 for column in zip(*drawn, strict=True))
    model.close()


def test_buffers_are_the_mean_over_slots_and_counts_stay_counts() -> None:
    model = andon.DataParallel(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), LocalGroup(), slots=2)
    optimizer = andon.AdamW(model)
    batches = [torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([[0.0, 0.0], [10.0, 20.0]])]
    for slot in model.slots:
        model.backward(model(batches[slot]).sum(), count=2)
        assert model.module[0].running_mean.tolist() == [0.0, 0.0]  # type: ignore[index]
    optimizer.step()
    norm: Any = model.module[0]  # type: ignore[index]
    assert norm.running_mean.tolist() == pytest.approx([0.1 * (2 + 5) / 2, 0.1 * (4 + 10) / 2])
    assert norm.num_batches_tracked.item() == 1
    model.close()


def test_a_loop_that_does_not_go_through_the_slots_gives_the_same_bits() -> None:
    found = []
    for through_slots in (True, False):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        model = andon.DataParallel(module, LocalGroup(), slots=2)
        optimizer = andon.AdamW(model, lr=0.1)
        for _ in range(3):
            for _ in model.slots if through_slots else range(2):
                model.backward(module(torch.eye(4)).square().mean(), count=4)
            optimizer.step()
        found.append(andon.digest(model))
        model.close()
    assert found[0] == found[1]


def test_a_loss_may_be_a_vector_of_one_element() -> None:
    found = []
    for shape in ((), (1,)):
        torch.manual_seed(1)
        model = andon.DataParallel(nn.Linear(4, 1), LocalGroup(), slots=2)
        optimizer = andon.AdamW(model, lr=0.1)
        for _ in model.slots:
            model.backward(model(torch.eye(4)).square().mean().reshape(shape), count=4)
        found.append((optimizer.step(), andon.digest(model)))
        model.close()
    assert found[0] == found[1]


def frozen_differs(group: Group) -> str:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    frozen: Any = module[0].requires_grad_(False)
    nn.init.constant_(frozen.weight, group.rank // 2)
    try:
        andon.DataParallel(module, group, slots=3)
    except andon.JidokaHalt as halt:
        return str(halt)
    return "nothing"


def test_a_frozen_parameter_that_differs_on_a_rank_halts_before_the_first_step() -> None:
    with World("shm", 3) as world:
        found = set(world.run(frozen_differs))
    assert found == {"halted at step 1: 0.weight is not trained, and differs on rank 2"}


def buffers_differ_later(group: Group) -> str:
    model = andon.DataParallel(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), group, slots=3)
    optimizer = andon.AdamW(model)
    try:
        for _ in range(2):
            for _ in model.slots:
                model.backward(model(torch.randn(4, 3)).sum(), count=4)
            optimizer.step()
            if group.rank == 1:
                model.module[0].running_var[1] += 1e-3  # type: ignore[index]
    except andon.JidokaHalt as halt:
        return str(halt)
    finally:
        model.close()
    return "nothing"


def test_a_buffer_that_differs_on_a_rank_halts_the_next_step() -> None:
    with World("shm", 3) as world:
        assert set(world.run(buffers_differ_later)) == {"halted at step 2: the buffers of the model differ on rank 1"}


def steps_with(scheduler: Any, optimizer: andon.AdamW, model: andon.DataParallel, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        for _ in model.slots:
            model.backward(model(torch.ones(2, 3)).square().mean(), count=2)
        loss = optimizer.step().loss
        rates.append(optimizer.lr)
        scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    return rates


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=10),
    "milestones": lambda optimizer: MultiStepLR(optimizer, [2, 4]),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=12),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_work_as_with_torchs_own_optimizer_and_their_state_survives_json(name: str) -> None:
    model = andon.DataParallel(nn.Linear(3, 1), LocalGroup(), slots=1)
    optimizer = andon.AdamW(model, lr=1e-2)
    rates = steps_with(SCHEDULERS[name](optimizer), optimizer, model, 6)
    plain_model = nn.Linear(3, 1)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
    scheduler: LRScheduler = SCHEDULERS[name](plain)
    if name != "plateau":
        expected = []
        for _ in range(6):
            plain.step()
            expected.append(plain.param_groups[0]["lr"])
            scheduler.step()
        assert rates == expected
    state = scheduler.state_dict()
    assert from_json(to_json(state)) == state
    model.close()


def test_clipping_happens_only_when_it_is_asked_for() -> None:
    weights = []
    for clip in (0.0, 1e9, 1e-3):
        torch.manual_seed(1)
        model = andon.DataParallel(nn.Linear(3, 1), LocalGroup(), slots=1)
        optimizer = andon.AdamW(model, lr=0.1, eps=1e-2)
        model.backward(100 * model(torch.ones(1, 3)).sum(), count=1)
        optimizer.step(clip)
        weights.append(model.arena.weights.clone())
        model.close()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


class Sign(UpdateRule):
    """A small optimizer: momentum, and steps of one size."""

    def __init__(self, arena: Arena, parts: Sequence[Range], updated: Sequence[Range] | None = None) -> None:
        super().__init__(arena, parts, updated)
        self.state = {"momentum": arena.zeros(self.size)}

    @torch.no_grad()
    def update(self, gradients: Tensor, scale: float, options: Mapping[str, Any]) -> None:
        at = 0
        for start, stop in self.parts:
            momentum = self.state["momentum"][at : at + stop - start]
            momentum.mul_(0.9).add_(gradients[start:stop])
            self.arena.weights[start:stop].sub_(momentum.sign(), alpha=options["lr"])
            at += stop - start
        self.updates += 1


class SignOptimizer(andon.Optimizer):
    rule_type = Sign


def train_with_sign(group: Group) -> str:
    torch.manual_seed(1)
    model = andon.DataParallel(nn.Linear(9, 2), group, slots=3)
    optimizer = SignOptimizer(model, {"lr": 0.1})
    for _ in range(3):
        for _ in model.slots:
            model.backward(model(torch.randn(4, 9)).square().mean(), count=4)
        optimizer.step()
    model.close()
    return andon.digest(model)


def test_another_optimizer_is_one_class_and_gives_one_answer_too() -> None:
    found = set()
    for transport, size in (("local", 1), ("shm", 3)):
        with World(transport, size) as world:
            found |= set(world.run(train_with_sign))
    assert len(found) == 1


def train_bf16_wire(group: Group) -> str:
    torch.manual_seed(1)
    model = andon.DataParallel(nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)), group, slots=7)
    optimizer = andon.AdamW(model, lr=0.01)
    for _ in range(3):
        for _ in model.slots:
            model.backward(model(torch.randn(4, 40)).square().mean(), count=4)
        optimizer.step()
    model.close()
    return andon.digest(model)


def test_a_bf16_wire_gives_one_answer_for_any_number_of_ranks_and_any_transport() -> None:
    found = set()
    for transport, size in (("local", 1), ("shm", 2), ("shm", 3), ("star", 3), ("torch", 4)):
        with World(transport, size, wire="bf16") as world:
            found |= set(world.run(train_bf16_wire))
    assert len(found) == 1


def test_a_plain_backward_and_gradients_between_slots_are_not_what_ddp_users_expect_and_are_refused() -> None:
    model = andon.DataParallel(nn.Linear(3, 1), LocalGroup(), slots=2)
    andon.AdamW(model)
    x = torch.ones(1, 3)
    model.backward(model(x).sum(), count=1)
    with pytest.raises(RuntimeError, match=r"clip with optimizer.step\(clip=...\)"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="call backward of the DataParallel model"):
        model(x).sum().backward()
    model.close()


def draw_first(group: Group) -> str:
    """All batches of a step are drawn before its first forward."""
    torch.manual_seed(1)
    model = andon.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)), group, slots=2)
    optimizer = andon.AdamW(model, lr=0.1)
    for _ in range(3):
        for x in [torch.randn(4, 4) for _ in model.slots]:
            model.backward(model(x).square().mean(), count=torch.tensor(4))  # type: ignore[arg-type]
        optimizer.step()
    model.close()
    return andon.digest(model)


def test_batches_that_are_drawn_before_the_first_forward_give_one_answer_too() -> None:
    found = set()
    for transport, size in (("local", 1), ("shm", 2)):
        with World(transport, size) as world:
            found |= set(world.run(draw_first))
    assert len(found) == 1


def test_complex_buffers_are_averaged_as_such() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))

    def turn(module: nn.Module, inputs: Any) -> None:
        module.phase.add_(0.5 + 1j)  # type: ignore[operator]

    module.register_forward_pre_hook(turn)
    model = andon.DataParallel(module, LocalGroup(), slots=2)
    optimizer = andon.AdamW(model)
    for _ in model.slots:
        model.backward(model(torch.randn(4, 2)).sum(), count=4)
    optimizer.step()
    assert module.phase.tolist() == [0.5 + 1j] * 2  # type: ignore[operator]
    model.close()


class Keeps(nn.Module):
    """A linear layer with a buffer that forward treats as it is told."""

    def __init__(self, buffer: Tensor | None, change: Callable[[nn.Module], None], persistent: bool = True) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(3, 1), change
        self.register_buffer("kept", buffer, persistent)

    def forward(self, x: Tensor) -> Any:
        self.change(self)
        return self.linear(x)


def one_step(module: nn.Module, slots: int = 4) -> andon.DataParallel:
    model = andon.DataParallel(module, LocalGroup(), slots)
    optimizer = andon.AdamW(model)
    for slot in model.slots:
        model.backward(model(torch.full((2, 3), float(slot))).sum(), count=2)
    optimizer.step()
    model.close()
    return model


def create(module: nn.Module) -> None:
    module.kept = torch.arange(3.0)


def grow(module: nn.Module) -> None:
    module.kept = torch.cat([module.kept, torch.ones(1)])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("buffer", "change", "what"),
    [
        (None, create, "creates the buffer kept"),
        (torch.zeros(2), grow, "changes the shape or dtype of the buffer kept"),
    ],
)
def test_a_buffer_that_forward_creates_or_reshapes_is_refused_unless_it_is_a_cache(
    buffer: Tensor | None, change: Callable[[nn.Module], None], what: str
) -> None:
    with pytest.raises(ValueError, match=f"forward {what}.*persistent=False"):
        one_step(Keeps(buffer, change))
    one_step(Keeps(buffer, change, persistent=False))


def test_a_flag_changes_if_any_slot_changed_it() -> None:
    calls: list[int] = []

    def flag(module: nn.Module) -> None:
        calls.append(1)
        if len(calls) == 2:
            module.kept ^= torch.tensor([True, True, False])  # type: ignore[operator]

    model = one_step(Keeps(torch.tensor([True, False, False]), flag))
    assert model.module.kept.tolist() == [False, True, False]  # type: ignore[operator]


def untrained_buffer_differs(group: Group) -> str:
    module = Keeps(torch.zeros(2), lambda module: None)
    model = andon.DataParallel(module, group, slots=3)
    optimizer = andon.AdamW(model)
    if group.rank == 2:
        module.kept += 1.0  # type: ignore[operator, assignment]
    try:
        for _ in model.slots:
            model.backward(model(torch.ones(2, 3)).sum(), count=2)
        optimizer.step()
    except andon.JidokaHalt as halt:
        return str(halt)
    finally:
        model.close()
    return "nothing"


def test_the_first_step_compares_buffers_that_never_change() -> None:
    with World("shm", 3) as world:
        found = set(world.run(untrained_buffer_differs))
    assert found == {"halted at step 1: the buffers of the model differ on rank 2"}


class Shared(nn.Module):
    """One layer in two segments, each with its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_gradient_that_arrives_twice_is_refused() -> None:
    model = andon.DataParallel(Shared(), LocalGroup(), slots=1)
    andon.AdamW(model)
    with pytest.raises(ValueError, match=r"got its gradient twice.*use_reentrant=False"):
        model.backward(model(torch.ones(2, 3, requires_grad=True)).sum(), count=2)
    model.close()


def convert(model: andon.DataParallel) -> None:
    model.bfloat16()


def freeze(model: andon.DataParallel) -> None:
    next(model.parameters()).requires_grad_(False)


@pytest.mark.parametrize(("change", "what"), [(convert, "was moved or converted"), (freeze, "was frozen")])
def test_a_module_that_is_changed_behind_the_arena_is_refused(
    change: Callable[[andon.DataParallel], None], what: str
) -> None:
    model = andon.DataParallel(nn.Linear(3, 1), LocalGroup(), slots=1)
    andon.AdamW(model)
    change(model)
    with pytest.raises(ValueError, match=f"weight {what} after DataParallel was made"):
        model(torch.ones(1, 3))
    model.close()


def test_a_sparse_gradient_is_added_like_a_dense_one() -> None:
    found = set()
    for sparse in (False, True):
        torch.manual_seed(5)
        model = andon.DataParallel(nn.Embedding(10, 3, sparse=sparse), LocalGroup(), slots=3)
        optimizer = andon.AdamW(model)
        for slot in model.slots:
            model.backward(model(torch.tensor([slot, slot, 9])).square().sum(), count=3)
        optimizer.step()
        model.close()
        found.add(andon.digest(model))
    assert len(found) == 1


def test_a_bf16_model_keeps_what_load_state_dict_gave_it() -> None:
    model = andon.DataParallel(nn.Sequential(nn.Linear(3, 1)).bfloat16(), LocalGroup(), slots=1)
    optimizer = andon.AdamW(model, lr=1e-3)
    model.module[0].load_state_dict({"weight": torch.full((1, 3), 7.0), "bias": torch.zeros(1)})  # type: ignore[index]
    for _ in model.slots:
        model.backward(model(torch.ones(1, 3, dtype=torch.bfloat16)).sum(), count=1)
    optimizer.step()
    assert model.state_dict()["module.0.weight"].float().sub(7).abs().max() < 0.1
    model.close()


def test_a_model_needs_an_optimizer_and_a_group_of_its_own_and_its_optimizer_is_saved_by_andon() -> None:
    group = LocalGroup()
    model = andon.DataParallel(nn.Linear(3, 1), group, slots=1)
    with pytest.raises(ValueError, match=r"make one first, such as andon.AdamW\(model\)"):
        model.backward(model(torch.ones(1, 3)).sum(), count=1)
    optimizer = andon.AdamW(model)
    with pytest.raises(RuntimeError, match=r"save it with andon.save"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"load it with andon.load"):
        optimizer.load_state_dict({})
    with pytest.raises(ValueError, match="count is -1"):
        model.backward(model(torch.ones(1, 3)).sum(), count=-1)
    with pytest.raises(ValueError, match="another model exchanges over this group"):
        andon.DataParallel(nn.Linear(3, 1), group, slots=1)
    model.close()
    andon.DataParallel(nn.Linear(3, 1), group, slots=1).close()
    assert not group.before_close
    with pytest.raises(ValueError, match="there is nothing to train"):
        andon.DataParallel(nn.Linear(3, 1).requires_grad_(False), group, slots=1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"betas": (2.0, 0.9)}, "betas are"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"zero": "maybe"}, "policies: off, even"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], complaint: str) -> None:
    model = andon.DataParallel(nn.Linear(3, 1), LocalGroup(), slots=1)
    with pytest.raises(ValueError, match=complaint):
        andon.AdamW(model, **options)
    with pytest.raises(TypeError, match="not its parameters"):
        andon.AdamW(model.parameters())  # type: ignore[arg-type]
    model.close()


def test_a_learning_rate_that_is_not_finite_touches_no_weight() -> None:
    model = andon.DataParallel(nn.Linear(3, 1), LocalGroup(), slots=1)
    optimizer, before = andon.AdamW(model), model.arena.weights.clone()
    model.backward(model(torch.ones(1, 3)).sum(), count=1)
    optimizer.lr = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        optimizer.step()
    assert torch.equal(model.arena.weights, before)
    model.close()


class Averages(nn.Linear):
    """Forward changes a buffer."""

    average: Tensor

    def __init__(self, size: int) -> None:
        super().__init__(4, 1)
        self.register_buffer("average", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.average += x.mean()
        return super().forward(x)


def train_with_a_buffer(group: Group, most: int) -> str:
    """Train with a buffer that is longer than a message between ranks may be."""
    vars(base).update(MAX_MESSAGE_BYTES=most)
    torch.manual_seed(3)
    model = andon.DataParallel(Averages(most), group, SLOTS)
    optimizer = andon.AdamW(model)
    for _ in range(2):
        for slot in model.slots:
            model.backward(model(torch.full((2, 4), float(slot))).mean(), count=2)
        optimizer.step()
    model.close()
    return andon.digest(model)


def test_a_buffer_that_forward_changes_may_be_longer_than_a_message() -> None:
    found = []
    for transport, size in (("local", 1), ("shm", 2), ("torch", 3)):
        with World(transport, size) as world:
            found += world.run(train_with_a_buffer, 20_000)
    assert len(set(found)) == 1


def share(group: Group, most: int) -> list[bool]:
    """Buffers of every kind come from rank 1."""
    vars(base).update(MAX_MESSAGE_BYTES=most)
    torch.manual_seed(group.rank)
    long = torch.randn(most)
    empty, wide = torch.zeros(0), torch.complex64
    buffers = [long, long > 0, torch.randn(3, 2).t(), torch.tensor(group.rank), empty, long.to(wide)]
    share_buffers(group, buffers, source=1)
    torch.manual_seed(1)
    wanted = torch.randn(most)
    others = [wanted > 0, torch.randn(3, 2).t(), torch.tensor(1), empty, wanted.to(wide)]
    return [torch.equal(one, other) for one, other in zip(buffers, [wanted, *others], strict=True)]


def test_buffers_of_every_kind_and_length_are_sent_to_workers_that_lack_them() -> None:
    for transport in ("shm", "torch"):
        with World(transport, 2) as world:
            assert world.run(share, 20_000) == [[True] * 6] * 2
