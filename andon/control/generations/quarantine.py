"""Quarantine: a place whose workers are lost again and again gets no other one."""

from collections import Counter

from andon.control.members import Place

STRIKES = 3
"""Losses in a row after which a place is quarantined."""
SETTLED = 10
"""Committed steps after which a worker counts as sound: its loss is the first in a row."""


class Quarantine:
    """Counts the losses of each place."""

    def __init__(self) -> None:
        self._strikes: Counter[Place] = Counter()

    def strike(self, place: Place, steps: int = 0) -> bool:
        """A worker of a place was lost, after it has taken part in so many steps; whether that was once too often."""
        self._strikes[place] = 1 if steps >= SETTLED else self._strikes[place] + 1
        return self._strikes[place] == STRIKES

    def __contains__(self, place: Place) -> bool:
        return self._strikes[place] >= STRIKES
