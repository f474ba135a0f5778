"""Stragglers: a synchronous step is as slow as its slowest rank, so the coordinator names that rank to the user.

Before the run begins it names the ranks that have not joined while others wait for them. Later every worker's heartbeat
reports how long forward and backward of its last step took. A rank that is much slower than the median of the others
for several heartbeats in a row is named, and is named again only if it was fast enough in between.
"""

import time
from collections.abc import Callable, Collection, Iterable
from statistics import median
from typing import Final

from andon.control.link import Message
from andon.control.members import Worker
from andon.run.records.events import Event

SLOW: Final = 1.5
"""A rank is slow if it takes this many times the median of the others."""
IN_A_ROW: Final = 5
SHORTEST_MS: Final = 20.0
"""Differences between shorter steps are noise."""
LONGEST_MS: Final = 1e9
LATE_SECONDS: Final = 30.0
"""After this wait the ranks that have not joined are named; again after twice that time, and so on."""


class Stragglers:
    """Watches how long the ranks' steps take; `notify` shows a line to the user."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._slow: dict[int, int] = {}
        self._step = 0
        self._first_joined = time.monotonic()
        self._late_after = LATE_SECONDS

    @property
    def at_step(self) -> str:
        """The step that the run has reached, as part of a sentence."""
        return f" after step {self._step:,}" if self._step else ""

    def wait_for_ranks(self, joined: Collection[int], world_size: int) -> None:
        """Name the ranks that have not joined, at growing intervals; called once a second before the run begins."""
        now = time.monotonic()
        if not joined:
            self._first_joined, self._late_after = now, LATE_SECONDS
        waited = now - self._first_joined
        if waited < self._late_after:
            return
        self._late_after *= 2
        missing = [str(rank) for rank in range(world_size) if rank not in joined]
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        self._notify(f"{len(joined)} of {world_size} workers have waited {waited:.0f} s for {ranks} to join")

    def on_event(self, event: Event) -> None:
        """Note the step that rank 0 reports."""
        if event["event"] == "step":
            self._step = event["step"]

    def on_heartbeat(self, worker: Worker, alive: Message, workers: Iterable[Worker]) -> None:
        """Compare the step time in a worker's heartbeat with those of the others."""
        took = alive.get("compute_ms")
        if not isinstance(took, int | float) or not 0 <= took < LONGEST_MS or worker.rank < 0:
            return
        worker.compute_ms = float(took)
        others = [other.compute_ms for other in workers if other.rank >= 0 and other is not worker]
        usual = median(others) if others else 0.0
        if usual < SHORTEST_MS or worker.compute_ms < SLOW * usual:
            self._slow.pop(worker.rank, None)
            return
        self._slow[worker.rank] = self._slow.get(worker.rank, 0) + 1
        if self._slow[worker.rank] == IN_A_ROW:
            slower = worker.compute_ms / usual
            text = f"{worker.name} is slow: forward and backward take it {worker.compute_ms:.0f} ms"
            self._notify(f"{text}, {slower:.1f} × the others; they wait for it in every step")
