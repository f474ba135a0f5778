"""The chain of committed steps that the ledger records: each step once, in order, whichever rank reports it.

Several ranks may report the same step, and the links of two ranks differ in speed, so a report may arrive twice, or
before that of the step before. A return to a checkpoint cuts the chain back; each rank reports it before the steps that
follow.
"""

from collections.abc import Iterator
from typing import Any


class Chain:
    """The recorded steps; reports that arrive early wait."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        """The last recorded step."""
        self.cut_in = -1, 0
        """Of the last return to a checkpoint: its generation, and which one of the generation's returns it is."""
        self._early: dict[int, Any] = {}

    def add(self, step: int, record: Any) -> Iterator[Any]:
        """A rank reports a committed step; returns the records that can now be appended, in order."""
        if step > self.step:
            self._early.setdefault(step, record)
        while self.step + 1 in self._early:
            self.step += 1
            yield self._early.pop(self.step)

    def cut(self, generation: int, number: int, step: int) -> bool:
        """A rank reports a return of its generation to the checkpoint of a step; False if another rank has."""
        if (generation, number) <= self.cut_in:
            return False
        self.cut_in, self.step, self._early = (generation, number), step, {}
        return True
