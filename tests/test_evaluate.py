"""How good a model is, as numbers."""

from __future__ import annotations

import pytest

from andon.data.stories import stories
from andon.run.evaluate import bits_per_byte, story_score


def test_bits_per_byte() -> None:
    assert bits_per_byte(0.6931471805599453, 1.0) == pytest.approx(1.0)
    assert bits_per_byte(2.0794415416798357, 4.0) == pytest.approx(0.75)  # three bits in four bytes


def test_valid_and_known_stories_are_counted() -> None:
    known, _, new = stories(1, 3)  # of which two are in the training text
    score = story_score([known, new, "No story.", known], seed=1, count=2)
    assert score.valid_share == 0.75 and score.known == 2
