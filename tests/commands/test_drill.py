"""`andon drill`: every fault stops the line or is survived, and a line that did neither is not praised."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.commands.drill import Drill, drills
from tests.kit.runs import andon


def test_every_fault_stops_the_line_or_is_survived(tmp_path: Path) -> None:
    code, output = andon("drill", cwd=tmp_path)
    assert code == 0 and output.count("stopped") + output.count("went on") == len(drills("shm")), output
    assert "DID NOT" not in output


@pytest.mark.parametrize("drill", [*drills("shm"), *drills("protocol2")[-2:]], ids=lambda drill: drill.fault)
def test_a_run_that_ends_well_or_halts_elsewhere_did_not_stop(drill: Drill) -> None:
    assert not drill.passed(0, {}, "")
    assert not drill.passed(3, {"step": 99, "cause": "something else"}, "")
    assert not drill.passed(1, {}, "something else")
