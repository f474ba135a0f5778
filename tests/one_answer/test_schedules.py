"""Learning rates as numbers: what each schedule gives at given steps, as a fraction of the peak."""

from __future__ import annotations

import pytest
import torch

from andon.optim.schedules import rate

# 20 steps, of which 4 are warm-up, down to a tenth.
EXPECTED = {
    "constant": {1: 0.25, 2: 0.5, 4: 1.0, 5: 1.0, 12: 1.0, 20: 1.0},
    "linear": {1: 0.25, 4: 1.0, 5: 0.94375, 8: 0.775, 12: 0.55, 16: 0.325, 19: 0.15625, 20: 0.1},
    "cosine": {1: 0.25, 4: 1.0, 5: 0.9913533761, 8: 0.8681980515, 12: 0.55, 16: 0.2318019485, 20: 0.1},
    "wsd": {1: 0.25, 4: 1.0, 12: 1.0, 16: 1.0, 17: 0.775, 18: 0.55, 19: 0.325, 20: 0.1},
}


@pytest.mark.parametrize("schedule", EXPECTED)
def test_a_schedule_gives_these_numbers(schedule: str) -> None:
    found = {step: rate(schedule, step, 20, 4, 0.1) for step in EXPECTED[schedule]}
    assert found == pytest.approx(EXPECTED[schedule])


def test_the_cosine_is_torchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16, eta_min=0.1)
    for step in range(4, 21):
        assert rate("cosine", step, 20, 4, 0.1) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_without_warm_up_the_first_step_has_begun_to_decay() -> None:
    assert rate("linear", 1, 10, 0, 0.0) == pytest.approx(0.9)
    assert rate("linear", 10, 10, 0, 0.0) == pytest.approx(0.0)


def test_a_run_shorter_than_its_warm_up_never_reaches_the_peak() -> None:
    assert [rate("cosine", step, 3, 10, 0.1) for step in (1, 2, 3)] == pytest.approx([0.1, 0.2, 0.3])


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule"):
        rate("staircase", 5, 10, 0, 0.1)
