"""`andon drill`: every fault stops the line, and a line that did not stop is not praised."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.commands.drill import DRILLS, Drill
from tests.runs import andon


def test_every_fault_stops_the_line(tmp_path: Path) -> None:
    code, output = andon("drill", cwd=tmp_path)
    assert code == 0 and output.count("stopped") == len(DRILLS), output
    assert "DID NOT STOP" not in output


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.fault)
def test_a_run_that_ends_well_or_halts_elsewhere_did_not_stop(drill: Drill) -> None:
    assert not drill.stopped(0, {}, "")
    assert not drill.stopped(3, {"step": 99, "cause": "something else"}, "")
    assert not drill.stopped(1, {}, "something else")
