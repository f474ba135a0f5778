"""Generations as the coordinator numbers them: a state machine without a socket or a clock.

    waiting → member → parted → member …

A worker that is ready *waits*. The first generation begins when as many workers wait as are *wanted*; all of them are
its *members*. A member has *parted* when it has reported that it left the group of its generation, because another
member was lost or because a worker waits. When every member has parted or is lost, the next generation begins with the
parted and the waiting workers, if they are at least as many as the run *needs*. When fewer workers are wanted than take
part, some are *released*: the members part, and the next generation begins without the released ones. So no worker is a
member of two generations at once, and a generation begins only when no step of the previous one can still be committed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class Generations(Generic[W]):
    """The members of the current generation, and when the next one begins."""

    def __init__(self, wanted: int, needed: int = 1) -> None:
        self.wanted, self.needed = wanted, needed
        self.number = -1
        """The generation that began last; -1: none has begun."""
        self.members: list[W] = []
        """Ordered by rank, without those that were lost since."""
        self.parted: set[W] = set()
        self.waiting: list[W] = []
        self.released: set[W] = set()
        self.returning = False
        """Whether members may still come back to a restarted coordinator; no generation begins in this time."""
        self.renew = False
        """Whether the members should part although no worker joins or leaves."""
        self.over = False
        """Whether a member has left for good; then no further generation begins."""

    @property
    def full(self) -> bool:
        """Whether as many workers take part or wait as are wanted."""
        return len(self.members) + len(self.waiting) >= self.wanted

    @property
    def change_is_due(self) -> bool:
        """Whether the members should part after their step, because a worker waits to join or is released."""
        change = self.waiting or self.released or (self.renew and not self.returning)
        return bool(change) and not self.over and self.number >= 0

    def resize(self, wanted: int) -> None:
        """Change the number of workers that are wanted; the last ones are released if there are more."""
        self.wanted = wanted
        self._release()

    def ready(self, worker: W) -> None:
        """A worker is ready to take part."""
        if worker not in self.waiting and worker not in self.members:
            self.waiting.append(worker)

    def come_back(self, worker: W) -> None:
        """A member of the current generation has connected to a restarted coordinator."""
        self.number = max(self.number, 0)
        self.members.append(worker)

    def part(self, worker: W) -> None:
        """A member has left the group of the current generation and waits for the next one."""
        if worker in self.members:
            self.parted.add(worker)

    def lose(self, worker: W) -> None:
        """A worker is lost."""
        self.members = [member for member in self.members if member != worker]
        self.waiting = [each for each in self.waiting if each != worker]
        self.parted.discard(worker)
        if self.released:  # a released worker may stay in place of the lost one
            self._release()

    def leave(self, worker: W) -> None:
        """A member has finished or failed: the run ends."""
        self.over = self.over or worker in self.members
        self.lose(worker)

    def _release(self) -> None:
        too_many = (self.members + self.waiting)[self.wanted :]
        self.released = {worker for worker in too_many if worker in self.members}

    @property
    def following(self) -> list[W] | None:
        """The members of the next generation by rank, first those that have the run's state; None: it cannot begin."""
        if self.over or self.returning or len(self.parted) < len(self.members):
            return None
        together = [worker for worker in self.members + self.waiting if worker not in self.released]
        return together if len(together) >= (self.needed if self.number >= 0 else self.wanted) else None

    def next(self) -> list[W]:
        """Begin the next generation, which must be possible; returns its members."""
        together = self.following
        assert together, (self.members, self.parted, self.waiting, self.over)
        self.number += 1
        self.members, self.parted, self.waiting, self.released, self.renew = together, set(), [], set(), False
        return together
