"""Batches: pure, complete, in permuted order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from andon.data.batches import Batches, interleave, permute
from andon.errors import UserError


class Row:
    """Tokens 0, 1, 2, …: a window's content is its position."""

    def __init__(self, tokens: int) -> None:
        self.token_count = tokens

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        assert start >= 0 and start + count <= self.token_count
        return np.arange(start, start + count)


@given(st.integers(1, 3000), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_a_permutation_hits_everything_once(count: int, key: int) -> None:
    assert sorted(permute(index, count, key) for index in range(count)) == list(range(count))


def test_another_epoch_or_seed_is_another_order() -> None:
    orders = {tuple(permute(index, 50, key) for index in range(50)) for key in range(20)}
    assert len(orders) == 20


def test_an_epoch_visits_every_training_window_once_and_no_held_out_one() -> None:  # F-DP-002
    batches = Batches(Row(10 * 97 + 1), seed=3, slots=4, micro_batch=3, context=10, validation=0.1)
    steps = batches.training // 12
    seen = [window for step in range(1, steps + 1) for slot in range(4) for window in batches.windows(step, slot)]
    held_out = {int(x[0, 0]) // 10 for x, _ in batches.validation(1000) for x in [x]}
    assert len(seen) == len(set(seen)) == steps * 12
    assert batches.training + batches.held_out == 97 and batches.held_out == 9
    assert not held_out & set(seen)


def test_the_samples_of_a_step_are_dealt_to_its_slots_in_turn() -> None:  # C-SHARD-001
    whole = Batches(Row(10_001), seed=1, slots=1, micro_batch=12, context=10, validation=0)
    split = Batches(Row(10_001), seed=1, slots=4, micro_batch=3, context=10, validation=0)
    for step in (1, 2, 90):
        everything = whole.windows(step, 0)
        for slot in range(4):
            assert split.windows(step, slot) == everything[slot::4]


@pytest.mark.parametrize(("count", "parts"), [(10, 2), (7, 3), (5, 1), (2, 4), (0, 3)])
def test_interleaved_parts_are_disjoint_and_complete(count: int, parts: int) -> None:
    dealt = [index for part in range(parts) for index in interleave(count, part, parts)]
    assert sorted(dealt) == list(range(count))
    assert list(interleave(7, 0, 3)) == [0, 3, 6]


def test_targets_are_the_inputs_shifted_by_one() -> None:
    batches = Batches(Row(1001), seed=5, slots=2, micro_batch=4, context=10, validation=0.1)
    x, y = batches(3, 1)
    assert x.shape == y.shape == (4, 10)
    assert (y == x + 1).all()


def test_a_batch_is_a_pure_function_of_seed_step_and_slot() -> None:
    first = Batches(Row(1001), seed=5, slots=2, micro_batch=4, context=10, validation=0.1)
    again = Batches(Row(1001), seed=5, slots=2, micro_batch=4, context=10, validation=0.1)
    for _ in range(5):
        first(1, 0)
    assert (first(9, 1)[0] == again(9, 1)[0]).all()


def test_text_shorter_than_one_window_is_refused() -> None:
    with pytest.raises(UserError, match="fewer than one window of 65"):
        Batches(Row(40), seed=1, slots=1, micro_batch=1, context=64, validation=0.1)


def test_a_corpus_of_one_window_still_trains() -> None:
    batches = Batches(Row(65), seed=1, slots=2, micro_batch=2, context=64, validation=0.1)
    assert batches.windows(1, 0) == [0, 0]
    assert len(batches.validation(10)) == 1


def test_every_epoch_has_all_training_windows_in_an_order_of_its_own() -> None:
    batches = Batches(Row(10 * 60 + 1), seed=3, slots=2, micro_batch=3, context=10, validation=0.1)
    assert batches.training == 54  # nine steps
    epochs = [
        [window for step in range(9 * epoch + 1, 9 * epoch + 10) for window in step_of(batches, step)]
        for epoch in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == [window for window in range(60) if window % 10 != 9]
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def step_of(batches: Batches, step: int) -> list[int]:
    return [window for slot in range(2) for window in batches.windows(step, slot)]


def test_the_order_of_a_seed_never_changes() -> None:
    batches = Batches(Row(10 * 60 + 1), seed=3, slots=2, micro_batch=3, context=10, validation=0.1)
    assert [batches.windows(1, 0), batches.windows(1, 1)] == [[11, 34, 3], [1, 8, 54]]
    assert [batches.windows(10, 0), batches.windows(10, 1)] == [[47, 14, 17], [32, 13, 16]]


def test_validation_takes_the_first_windows_that_are_held_out() -> None:
    batches = Batches(Row(10 * 60 + 1), seed=3, slots=2, micro_batch=3, context=10, validation=0.1)
    firsts = [[int(row[0]) for row in x] for x, _ in batches.validation(4)]
    assert firsts == [[90, 190, 290], [390]]
    assert all((y == x + 1).all() for x, y in batches.validation(4))
