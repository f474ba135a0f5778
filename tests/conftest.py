"""No test leaves a process behind, and none depends on chance: hypothesis tries the same examples every time, unless
ANDON_SOAK_SEED asks for others."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.kit import prefork, runs

settings.register_profile("andon", derandomize="ANDON_SOAK_SEED" not in os.environ, deadline=None)
settings.load_profile("andon")


def pytest_configure() -> None:
    """All processes of this session fork from one that has loaded torch."""
    prefork.share_source()


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the collector need not walk it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """End whatever a failed test has started, workers included."""
    yield
    runs.end_started()
