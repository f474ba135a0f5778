"""The comparison of two trees, tried on a tree and its own commit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT
from tests.kit.runs import SMALL


@pytest.mark.soak  # two whole starts; no promise of Andon is in it
def test_two_trees_take_turns_and_both_end() -> None:
    settings = [each for each in SMALL if not each.startswith("--train.steps")]
    command = [sys.executable, "-m", "tests.bench.compare", "HEAD", "--pairs=2", "--seconds=0.4", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "ratio of step times: median of 2 pairs" in done.stdout, done
