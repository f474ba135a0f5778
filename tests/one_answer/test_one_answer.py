"""C-ONE-001, F-DP-001: one answer for any number of workers and transport, and it is the plain loop's answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from andon.checkpoint.disk.store import weights_blake3
from andon.config.schema import Config
from andon.data.batches import Batches
from andon.data.token_set import TokenSet
from andon.engine.gradients.order import middle
from andon.engine.trainer import Trainer
from andon.engine.verdict import Totals
from andon.model.llama import Llama
from andon.optim import schedules
from andon.transport.base import Group
from andon.transport.registry import TRANSPORTS
from tests.kit.group_harness import World, worlds
from tests.kit.training import make_trainer, small_config, small_tokens, train_digest

STEPS = 8


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokens(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def answer(tokens: Path) -> str:
    return plain_loop(tokens, small_config(train__steps=STEPS, optim__clip=0))


def plain_loop(folder: Path, config: Config) -> str:
    """One process, torch.optim.AdamW, and the tree of additions written out: the oracle, without clipping."""
    torch.set_num_threads(1)
    train, optim = config.train, config.optim
    source = TokenSet.open(folder)
    batches = Batches(source, config.seed, train.slots, train.micro_batch, train.context, config.data.validation)
    model = Llama(config.shape)
    model.initialise(config.seed)
    named = dict(model.named_parameters())
    decayed = [value for value in named.values() if value.dim() > 1]
    others = [value for value in named.values() if value.dim() == 1]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True)

    def slot_gradient(step: int, slot: int) -> dict[str, Tensor]:
        x, y = batches(step, slot)
        model.zero_grad()
        model(torch.from_numpy(x), torch.from_numpy(y)).backward()
        return {name: value.grad.clone() for name, value in named.items() if value.grad is not None}

    def tree(step: int, lo: int, hi: int) -> dict[str, Tensor]:
        if hi - lo == 1:
            return slot_gradient(step, lo)
        mid = middle(lo, hi)
        left, right = tree(step, lo, mid), tree(step, mid, hi)
        return {name: left[name] + right[name] for name in left}

    for step in range(1, train.steps + 1):
        total = tree(step, 0, train.slots)
        count = config.tokens_per_step
        for name, value in named.items():
            value.grad = total[name] / count
        fraction = schedules.rate(optim.schedule, step, train.steps, optim.warmup, optim.final_lr)
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * fraction
        optimizer.step()
    return weights_blake3(named)


@pytest.mark.parametrize(
    ("transport", "size"), [w for w in worlds(1, 2, 3, 4, processes_only=True) if TRANSPORTS[w[0]].one_order]
)
def test_every_transport_and_number_of_workers_gives_the_answer(
    tokens: Path, answer: str, transport: str, size: int
) -> None:
    config = small_config(train__steps=STEPS, optim__clip=0)
    with World(transport, size) as world:
        assert world.run(train_digest, tokens, config, deadline=100) == [answer] * size


@pytest.mark.soak
@pytest.mark.parametrize(("transport", "size"), [("shm", 3), ("star", 4), ("torch", 2)])
def test_after_two_hundred_steps_it_is_still_the_answer(tokens: Path, transport: str, size: int) -> None:
    config = small_config(train__steps=200, optim__clip=0)
    with World(transport, size) as world:
        digests = world.run(train_digest, tokens, config, deadline=100)
    assert digests == [plain_loop(tokens, config)] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_ring_is_the_same_on_all_its_ranks_and_at_two_workers_the_answer(
    tokens: Path, answer: str, size: int
) -> None:
    config = small_config(train__steps=STEPS, optim__clip=0)
    with World("ring", size) as world:
        digests = world.run(train_digest, tokens, config, deadline=100)
    assert len(set(digests)) == 1
    if size <= 2:
        assert digests[0] == answer


@pytest.mark.parametrize("size", [2, 3])
def test_clipping_does_not_change_the_answer(tokens: Path, size: int) -> None:
    config = small_config(train__steps=6, optim__clip=0.05)
    with World("torch", 1) as world:
        (alone,) = world.run(train_digest, tokens, config)
    with World("torch", size) as world:
        assert world.run(train_digest, tokens, config) == [alone] * size


def uneven_gradient(group: Group, tokens: Path, config: Config) -> tuple[bytes, bytes]:
    """One step in which slot s counts only its first 3 + s targets: the mean, and the mean by definition."""
    trainer = make_trainer(group, tokens, config)
    expected = global_mean(trainer, config)
    found: list[Tensor] = []

    def judge(step: int, totals: Totals) -> bool:
        found.append(trainer.model.gradients.rows[0] / totals.tokens)
        return False

    trainer.optimizer.judge = judge
    for slot in trainer.model.slots:
        x, y, _ = trainer.batch(1, slot)
        y = y.clone()
        y[:, 3 + slot :] = -100
        trainer.model.backward(trainer.model(x, y), int((y != -100).sum()), reduction="sum")
    totals = trainer.optimizer.step()
    assert totals.tokens == sum(2 * min(16, 3 + slot) for slot in range(8))
    trainer.close()
    return found[0].numpy().tobytes(), expected.numpy().tobytes()


def global_mean(trainer: Trainer, config: Config) -> Tensor:
    """The gradient of the loss averaged over all counted tokens of the step, in float64."""
    model = Llama(config.shape).double()
    weights = trainer.model.module.state_dict()
    model.load_state_dict({name: value.double() for name, value in weights.items()})
    losses, count = [], 0
    for slot in range(8):
        x, y, _ = trainer.batch(1, slot)
        y = y.clone()
        y[:, 3 + slot :] = -100
        losses.append(torch.nn.functional.cross_entropy(model.logits(x).flatten(0, 1), y.flatten(), reduction="sum"))
        count += int((y != -100).sum())
    (torch.stack(losses).sum() / count).backward()  # type: ignore[no-untyped-call]
    flat = torch.zeros(trainer.model.arena.layout.size)
    for name, value in model.named_parameters():
        assert value.grad is not None
        trainer.model.arena.layout.view(flat, name).copy_(value.grad)
    return flat


def test_slots_of_different_token_counts_are_weighted_by_tokens(tokens: Path) -> None:
    config = small_config(zero__policy="off")  # every rank has the whole gradient
    results = []
    for size in (1, 2, 3):
        with World("torch", size) as world:
            results += world.run(uneven_gradient, tokens, config)
    assert len({mean for mean, _ in results}) == 1
    mean, expected = (torch.frombuffer(bytearray(data), dtype=torch.float32) for data in results[0])
    torch.testing.assert_close(mean, expected, rtol=1e-4, atol=1e-7)
