"""The contracts' names stand in the table, in the code that keeps them and in the tests that break them."""

from __future__ import annotations

import re

import pytest

from tests import ROOT

NAMES = (
    *("C-DDP-001", "C-RING-001", "C-ZERO-001", "C-SHARD-001", "C-WIRE-002", "C-CKPT-001", "C-ONE-001"),
    *("F-DP-001", "F-DP-002", "F-DP-003", "F-DP-004"),
)
ROWS = dict(re.findall(r"^\| ([CF]-[\w-]+) \| (.*)$", (ROOT / "docs" / "contracts.md").read_text(), re.M))


def test_the_table_has_every_contract_once() -> None:
    assert sorted(ROWS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_contract_has_a_promise_a_place_that_keeps_it_and_a_test_that_breaks_it(name: str) -> None:
    """`tests/project/test_documents.py` looks up the functions."""
    promise, kept, tested = ROWS[name].removesuffix(" |").split(" | ")
    places = re.findall(r"`(andon/[\w/]+\.py):[\w.]+`", kept)
    tests = re.findall(r"`(tests/[\w/]+\.py):test_\w+`", tested)
    assert promise.endswith(".") and places and tests
    assert any(name in (ROOT / place).read_text() for place in places), f"{name} stands in none of {places}"
    assert any(name in (ROOT / test).read_text() for test in tests), f"{name} stands in none of {tests}"
