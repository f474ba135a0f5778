"""The named phases of a step: how long each took, and the places where faults on purpose strike.

    with phases("exchange"):
        …

Times add up over the slots of a step. `on_enter` is told of every phase as it begins, and of the places
inside a save; the drills hang on it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Times the phases of the current step."""

    def __init__(self) -> None:
        self.step = 0
        self.milliseconds: dict[str, float] = {}
        self.last: dict[str, float] = {}
        """What the step before took."""
        self.on_enter: Callable[[str, int], None] = _nothing
        """Called with the place and the step."""

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self.last, self.milliseconds = step, self.milliseconds, {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """One phase of the step."""
        started = time.perf_counter()
        self.on_enter(name, self.step)
        yield
        seconds = time.perf_counter() - started
        self.milliseconds[name] = self.milliseconds.get(name, 0.0) + 1e3 * seconds


def _nothing(place: str, step: int) -> None:
    pass
