"""The named phases of a step: how long each took, and the places where faults on purpose strike.

    with phases("exchange"):
        …

Times add up over the slots of a step. `on_enter` is told of every phase as it begins, and of the places
inside a save; the drills hang on it. With every step's exchange the ranks tell each other what the step before took,
so that a slow one is seen.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class Phases:
    """Times the phases of the current step."""

    def __init__(self) -> None:
        self.step = 0
        self.milliseconds: dict[str, float] = {}
        self.last: dict[str, float] = {}
        """What the step before took."""
        self.of_ranks: dict[str, list[float]] = {}
        """What the step before took on every rank, by phase and rank."""
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

    def status(self) -> dict[str, float]:
        """What this rank tells the others: its times of the step before."""
        return {name: round(milliseconds, 1) for name, milliseconds in self.last.items()}

    def receive(self, statuses: Sequence[dict[str, float]]) -> None:
        """What the ranks have told, by rank."""
        names = dict.fromkeys(name for status in statuses for name in status)
        self.of_ranks = {name: [status.get(name, 0.0) for status in statuses] for name in names}


def _nothing(place: str, step: int) -> None:
    pass
