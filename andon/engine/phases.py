"""The named phases of a step: how long each took, and where injected faults strike.

    with phases("exchange"):
        …

Times are summed over the slots of a step. `on_enter` is called when a phase begins, and at named places inside a save;
injected faults use it. As a passenger of every step's exchange the ranks report their times of the step before, so that
a slow rank is found.
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
        """Those of the step before."""
        self.of_ranks: dict[str, list[float]] = {}
        """Those of the step before on every rank, by phase and rank."""
        self.on_enter: Callable[[str, int], None] = lambda place, step: None
        """Called with the phase or place, and the step."""

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.step, self.last, self.milliseconds = step, self.milliseconds, {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time one phase of the step."""
        started = time.perf_counter()
        self.on_enter(name, self.step)
        yield
        seconds = time.perf_counter() - started
        self.milliseconds[name] = self.milliseconds.get(name, 0.0) + 1e3 * seconds

    def status(self) -> dict[str, float]:
        """This rank's times of the step before."""
        return {name: round(milliseconds, 1) for name, milliseconds in self.last.items()}

    def receive(self, statuses: Sequence[dict[str, float]]) -> None:
        """Take the times of all ranks."""
        names = dict.fromkeys(name for status in statuses for name in status)
        self.of_ranks = {name: [status.get(name, 0.0) for status in statuses] for name in names}
