"""The chain of committed steps, as the ledger keeps it: each step once, in order, from whoever reports it.

Several ranks may report the same step, and the links of two ranks are not in step with each other, so a report may come
twice or before the one of the step before. A return to a checkpoint cuts the chain back; all ranks report it before
anything that follows it.
"""

from collections.abc import Iterator
from typing import Any


class Chain:
    """The steps that are recorded; what comes early waits."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        """The last step that is recorded."""
        self.cut_in = -1
        """The generation that has begun with a return to a checkpoint last."""
        self._early: dict[int, Any] = {}

    def add(self, step: int, record: Any) -> Iterator[Any]:
        """A rank reports a committed step; the records that follow on what is there."""
        if step > self.step:
            self._early.setdefault(step, record)
        while self.step + 1 in self._early:
            self.step += 1
            yield self._early.pop(self.step)

    def cut(self, generation: int, step: int) -> bool:
        """A rank reports that its generation begins after the checkpoint of a step; whether it is the first to."""
        if generation <= self.cut_in:
            return False
        self.cut_in, self.step, self._early = generation, step, {}
        return True
