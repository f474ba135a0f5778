"""An update that is launched before its verdict is read (one worker on a GPU) is the same as one after it, and none if
the step is not sound. The CPU computes it, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.engine.membership import Membership
from andon.integrity.halt import JidokaHalt
from andon.model.shape import SHAPES
from andon.run.mfu import mfu, peak_of
from andon.run.pretraining import compute_one_slot
from andon.transport.base import Group
from andon.transport.local import LocalGroup
from tests.kit.group_harness import World
from tests.kit.training import digest, make_trainer, small_config, small_tokens


@pytest.mark.parametrize("clip", [0.0, 0.05, 1000.0])
@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_ahead_of_the_verdict_or_after_it_the_bits_are_the_same(tmp_path: Path, clip: float, weights: str) -> None:
    tokens = small_tokens(tmp_path)
    found = []
    for ahead in (False, True):
        config = small_config(optim__clip=clip, train__weights=weights, train__slots=3)
        trainer = make_trainer(LocalGroup(), tokens, config)
        trainer.optimizer._updates_ahead = ahead
        for _ in range(5):
            totals = trainer.train_step()
        found.append((digest(trainer), totals))
        trainer.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_step_that_is_not_sound_changes_nothing_although_its_update_was_launched(tmp_path: Path, kind: str) -> None:
    config = small_config(fault=(f"{kind}:rank=0,step=3",))
    trainer = make_trainer(LocalGroup(), small_tokens(tmp_path), config)
    trainer.optimizer._updates_ahead = True
    for _ in range(2):
        trainer.train_step()
    before = digest(trainer)
    with pytest.raises(JidokaHalt) as halt:
        trainer.train_step()
    assert halt.value.findings[0].slot == 0
    assert digest(trainer) == before and trainer.optimizer.rule.updates == 2
    trainer.close()


def test_a_skipped_step_counts_as_no_update(tmp_path: Path) -> None:
    tokens, found = small_tokens(tmp_path), []
    for ahead in (False, True):
        config = small_config(fault=("nan:rank=0,step=3",), on_nonfinite="skip")
        trainer = make_trainer(LocalGroup(), tokens, config)
        trainer.optimizer._updates_ahead = ahead
        for _ in range(5):
            trainer.train_step()
        assert trainer.progress.skipped == 1 and trainer.optimizer.rule.updates == 4
        found.append(digest(trainer))
        trainer.close()
    assert found[0] == found[1]


def test_every_generation_decides_anew_whether_to_update_ahead(tmp_path: Path) -> None:
    """Ahead in one generation, after the verdict in the next, as where workers have joined, and ahead again."""
    tokens, found = small_tokens(tmp_path), []
    for changes in (False, True):
        config = small_config(train__slots=3)
        trainer = make_trainer(LocalGroup(), tokens, config)
        for step in range(6):
            if changes and step in (2, 4):
                trainer.part()
                recovery = trainer.enter(Membership.of(LocalGroup(), 3), recorded=step)
                assert recovery.step == step and not trainer.optimizer._updates_ahead, "only a GPU has a reason to"
            trainer.optimizer._updates_ahead = changes and step not in (2, 3)
            totals = trainer.train_step()
        assert trainer.optimizer.commit.step == trainer.optimizer.rule.updates == 6
        found.append((digest(trainer), totals))
        trainer.close()
    assert found[0] == found[1]


def grow(group: Group, tokens: Path) -> str:
    """Rank 0 is alone for two steps, and then two more with another worker, which was warmed up."""
    config = small_config(train__slots=3)
    trainer = make_trainer(LocalGroup(), tokens, config)
    optimizer = trainer.optimizer
    optimizer.is_new = group.rank > 0
    if optimizer.is_new:
        before = digest(trainer)
        compute_one_slot(trainer.model, config.train.micro_batch, config.train.context)
        assert digest(trainer) == before and optimizer.progress.step == optimizer.rule.updates == 0
    else:
        optimizer._updates_ahead = True
        for _ in range(2):
            trainer.train_step()
    trainer.part()
    recovery = trainer.enter(Membership.of(group, 3), recorded=1)
    assert recovery.step == 2 and recovery.new == {1} and not recovery.late and list(recovery.records) == [2]
    for _ in range(2):
        assert not optimizer._updates_ahead
        trainer.train_step()
    found = digest(trainer)
    trainer.close()
    return found


def test_a_worker_that_was_alone_and_one_that_was_warmed_up_go_on_together(tmp_path: Path) -> None:
    tokens = small_tokens(tmp_path)
    alone = make_trainer(LocalGroup(), tokens, small_config(train__slots=3))
    for _ in range(4):
        alone.train_step()
    with World("shm", 2) as world:
        found = world.run(grow, tokens)
    assert found == [digest(alone)] * 2
    alone.close()


def test_an_update_ahead_of_a_verdict_that_forbids_it_is_a_broken_invariant(tmp_path: Path) -> None:
    trainer = make_trainer(LocalGroup(), small_tokens(tmp_path), small_config())
    trainer.optimizer._updates_ahead, trainer.optimizer.judge = True, lambda step, totals: False
    with pytest.raises(AssertionError, match="ahead of its verdict"):
        trainer.train_step()
    trainer.close()


def test_a_token_costs_six_operations_a_weight_and_those_of_attention() -> None:
    shape = SHAPES["350m"]
    weights = shape.layers * (2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096 + 2 * 1024) + 1024 + 32_768 * 1024
    assert shape.operations_per_token == 6 * weights + 12 * 24 * 1024 * 1024
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989e12 and peak_of("some card") is None
    assert peak_of("NVIDIA GeForce RTX 4090") == 165e12 and peak_of("NVIDIA H200 NVL") == 835e12
    assert not any(map(peak_of, ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")))
    assert peak_of("NVIDIA H100 PCIe") == 756e12 and peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert mfu(shape, 989e12 / shape.operations_per_token, 989e12) == pytest.approx(1.0)
