"""No test leaves a process behind; some need the machine for themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import runs

ALONE = {*("test_group_contract", "test_ring", "test_star", "test_shm", "test_torch_group"), "test_gradient_server"}
"""Files whose deadlines other tests would disturb."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, so that `make test` can run the rest side by side."""
    for item in items:
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """End whatever a failed test has started, workers included."""
    yield
    runs.end_started()
