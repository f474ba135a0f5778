"""Ranks that were given other settings are stopped before their first update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from andon.integrity.halt import JidokaHalt
from andon.transport.base import Group
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
