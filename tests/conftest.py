"""No test leaves a process behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import runs


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """End whatever a failed test has started, workers included."""
    yield
    runs.end_started()
