"""The list of faults stays true: each still fits the code, and names tests that exist."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import ROOT
from tests.mutants import Mutant, everything

ROOMS = (
    *("board", "checkpoint", "cluster", "commands", "config", "data", "engine", "finetune", "integrity", "model"),
    *("optim", "protocol2", "run", "transport"),
)


@pytest.mark.parametrize("mutant", everything(), ids=lambda mutant: mutant.id)
def test_a_fault_fits_the_code_and_its_tests_exist(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old and mutant.tests and mutant.says.endswith(".")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text() or not name


def test_there_are_many_faults_in_every_room() -> None:
    faults = everything()
    assert len(faults) >= 80 and max(Counter(mutant.id for mutant in faults).values()) == 1
    by_room = Counter(mutant.file.partition("/")[0] for mutant in faults)
    assert min(by_room[room] for room in ROOMS) >= 4, by_room
