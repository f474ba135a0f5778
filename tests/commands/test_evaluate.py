"""How good a model is, as numbers."""

from __future__ import annotations

import pytest

from andon.data.stories import entropy, stories
from andon.run.evaluate import bits_per_byte, loss_floor, story_score


def test_bits_per_byte() -> None:
    assert bits_per_byte(0.6931471805599453, 1.0) == pytest.approx(1.0)
    assert bits_per_byte(2.0794415416798357, 4.0) == pytest.approx(0.75)  # three bits in four bytes


def test_valid_and_known_stories_are_counted() -> None:
    known = list(stories(1, 3))
    (other,) = stories(2, 1)
    score = story_score([known[0], known[2], "No story.", other], seed=1, count=3)
    assert score.valid_share == 0.75 and score.known == 2
    assert story_score(known, seed=1, count=2).known == 2


def test_the_floor_of_the_loss_is_the_entropy_of_a_token() -> None:
    assert loss_floor(story_count=200, token_count=1000) == pytest.approx(entropy() / 5)
