"""All ranks update with the same settings: others are stopped before the first update, a late rank uses the step's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import andon
from andon.engine.membership import Membership
from andon.engine.optimizer import AdamW
from andon.engine.parallel import DataParallel
from andon.integrity.halt import JidokaHalt
from andon.transport.base import Group, PeerLost
from tests.kit.group_harness import World
from tests.kit.training import make_trainer, small_config, small_tokens


def first_step(group: Group, tokens: Path, odd: dict[str, Any]) -> str:
    """The first step, in which rank 1 has settings of its own: what the halt says."""
    trainer = make_trainer(group, tokens, small_config(**(odd if group.rank == 1 else {})))
    try:
        trainer.train_step()
    except JidokaHalt as halt:
        return str(halt)
    finally:
        trainer.close()
    return "nothing"


@pytest.mark.parametrize(
    "odd", [{"optim__lr": 0.5}, {"optim__clip": 0.5}, {"optim__beta2": 0.5}, {"max_skips": 7}], ids=str
)
def test_a_rank_with_another_setting_is_named(tmp_path: Path, odd: dict[str, Any]) -> None:
    tokens = small_tokens(tmp_path)
    with World("shm", 3) as world:
        causes = world.run(first_step, tokens, odd)
    assert causes == ["halted at step 1: the facts of the step differ on rank 1"] * 3


def test_ranks_with_other_data_are_stopped(tmp_path: Path) -> None:
    with World("shm", 2) as world:
        causes = world.run(first_step_on_own_data, tmp_path)
    assert causes == ["halted at step 1: the facts of the step differ between ranks 0, 1"] * 2


def first_step_on_own_data(group: Group, folder: Path) -> str:
    from andon.data.build import Corpus, prepare

    corpus = Corpus(vocab_size=300, stories_count=300, stories_seed=group.rank)
    return first_step(group, prepare(corpus, folder / str(group.rank)).folder, {})


def miss_a_verdict(group: Group, late: int | None) -> tuple[list[int], str]:
    """Two steps, after which each script halves its learning rate; rank `late` receives the second verdict late."""
    torch.manual_seed(1)
    model = DataParallel(nn.Linear(4, 2), group, slots=2)
    optimizer = AdamW(model, lr=0.1, zero="off")
    optimizer.goes_on, norm, recovered = True, model.exchange.norm, []

    def lose_the_verdict() -> torch.Tensor:
        norm()
        raise PeerLost(1 - group.rank, "all-gather", 0.0, "its connection was closed")

    for step in range(2):
        for slot in model.slots:
            model.backward(model(torch.full((3, 4), slot + step + 1.0)).square().mean(), count=3)
        if step == 1 and group.rank == late:
            model.exchange.norm = lose_the_verdict  # type: ignore[method-assign]
        assert optimizer.step(clip=1.0).committed == (not optimizer.failure)
        optimizer.lr /= 2
    if late is not None:
        model.part()
        optimizer.failure = None
        recovered = sorted(optimizer.enter(Membership.of(group, 2), recorded=1).late)
    found = recovered, andon.digest(model)
    model.close()
    return found


def test_a_late_verdict_is_carried_out_with_the_learning_rate_of_its_step() -> None:
    with World("shm", 2) as world:
        undisturbed, disturbed = world.run(miss_a_verdict, None), world.run(miss_a_verdict, 1)
    assert [recovered for recovered, _ in disturbed] == [[1], [1]]
    assert {digest for _, digest in disturbed} == {digest for _, digest in undisturbed}
