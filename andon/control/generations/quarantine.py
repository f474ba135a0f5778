"""Quarantine: no further worker is admitted from a place whose workers are lost again and again."""

from collections import Counter

from andon.control.members import Place

STRIKES = 3
"""Losses in a row after which a place is quarantined."""
SOUND_AFTER_STEPS = 10
"""Committed steps after which a worker counts as sound: its loss is the first in a new row."""


class Quarantine:
    """Counts the losses of each place."""

    def __init__(self) -> None:
        self._strikes: Counter[Place] = Counter()

    def strike(self, place: Place, steps: int = 0) -> bool:
        """Count the loss of a worker that took part in `steps` steps; whether its place is quarantined from now on."""
        self._strikes[place] = 1 if steps >= SOUND_AFTER_STEPS else self._strikes[place] + 1
        return self._strikes[place] == STRIKES

    def __contains__(self, place: Place) -> bool:
        return self._strikes[place] >= STRIKES
