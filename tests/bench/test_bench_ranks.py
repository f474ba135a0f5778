"""Benchmarks run their ranks as processes: the first one that fails ends all of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from andon.bench import transport
from andon.bench.kit.processes import run_ranks
from andon.errors import UserError

RANK = """
import sys, time

def main(task):
    if task["fails"] == task["rank"]:
        sys.exit(7)
    time.sleep(task["seconds"])
    return task["rank"] * 10
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rank_of_a_test.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "rank_of_a_test"


def test_what_each_rank_returns_comes_back_by_rank(module: str) -> None:
    assert run_ranks(module, 3, {"fails": None, "seconds": 0}) == [0, 10, 20]


def test_the_first_rank_that_fails_ends_the_others(module: str) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match="Rank 1 of the benchmark failed") as raised:
        run_ranks(module, 3, {"fails": 1, "seconds": 60})
    assert "exit code 7" in raised.value.cause and time.monotonic() - began < 30


def test_the_ratio_of_a_transport_is_the_median_over_pairs_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow moment of the machine affects a turn of gloo and the turn after it, and so not their ratio."""
    seconds = {"gloo": [1.0, 10.0, 4.0], "shm": [1.0, 2.0, 8.0]}  # ratios 1, 5 and 0.5; ratio of the medians 2
    timings = {1 << 20: {name: [(each, 0.0) for each in turns] for name, turns in seconds.items()}}
    monkeypatch.setattr(transport, "_run_ranks", lambda *_: timings)
    rows = {row["transport"]: row for row in transport.run(["shm"], [2], [1 << 20], 3)}
    assert rows["shm"]["ratio"] == 1.0 and rows["gloo"]["ratio"] == 1.0
