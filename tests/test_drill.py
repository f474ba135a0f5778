"""`andon drill`: every fault stops the line, and a line that did not stop is not praised."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.commands.drill import REHEARSALS, Rehearsal
from tests.runs import andon


def test_every_fault_stops_the_line(tmp_path: Path) -> None:
    code, output = andon("drill", cwd=tmp_path)
    assert code == 0 and output.count("stopped") == len(REHEARSALS), output
    assert "DID NOT STOP" not in output


@pytest.mark.parametrize("rehearsal", REHEARSALS, ids=lambda rehearsal: rehearsal.fault)
def test_a_run_that_ends_well_or_halts_elsewhere_did_not_stop(rehearsal: Rehearsal) -> None:
    assert not rehearsal.stopped(0, {}, "")
    assert not rehearsal.stopped(3, {"step": 99, "cause": "something else"}, "")
    assert not rehearsal.stopped(1, {}, "something else")
