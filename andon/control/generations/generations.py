"""Generations as the coordinator numbers them: a state machine without a socket or a clock.

    waiting → member → parted → member …

A worker that is ready *waits*. The first generation begins when as many wait as are *wanted*; all of them are its
*members*. A member *parts* when it has left the group of its generation, because another member was lost or because
somebody waits, and says so. When every member has parted or was lost, the next generation begins with those who parted
and those who wait, if they are at least as many as the run *needs*. When fewer are wanted than take part, some are
*released*: the members part, and the next generation begins without them. So nobody is a member of two generations at
once, and a generation begins only when nobody can still commit a step of the one before.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class Generations(Generic[W]):
    """Who takes part in which generation."""

    def __init__(self, wanted: int, needed: int = 1) -> None:
        self.wanted, self.needed = wanted, needed
        self.number = -1
        """Of the generation that has begun last; -1: none has."""
        self.members: list[W] = []
        """By rank; those who were lost since are no longer among them."""
        self.parted: set[W] = set()
        self.waiting: list[W] = []
        self.released: set[W] = set()
        self.returning = False
        """Whether members may still come back to a coordinator that was gone: until then no generation begins."""
        self.renew = False
        """Whether the members should part, though nobody comes or goes."""
        self.over = False
        """Whether a member has left for good: then no other generation begins."""

    @property
    def full(self) -> bool:
        """Whether as many workers as are wanted take part or wait."""
        return len(self.members) + len(self.waiting) >= self.wanted

    @property
    def change_is_due(self) -> bool:
        """Whether the members should part after their step, because somebody waits who could take part, or is to go."""
        change = self.waiting or self.released or (self.renew and not self.returning)
        return bool(change) and not self.over and self.number >= 0

    def resize(self, wanted: int) -> None:
        """From now on so many workers are wanted: the last ones are released if there are more."""
        self.wanted = wanted
        self._release()

    def ready(self, worker: W) -> None:
        """A worker could take part."""
        if worker not in self.waiting and worker not in self.members:
            self.waiting.append(worker)

    def come_back(self, worker: W, rank: int) -> None:
        """A member of the current generation is here again."""
        self.number = max(self.number, 0)
        self.members.insert(min(rank, len(self.members)), worker)

    def part(self, worker: W) -> None:
        """A member has left the group of the current generation and waits for the next one."""
        if worker in self.members:
            self.parted.add(worker)

    def lose(self, worker: W) -> None:
        """A worker is gone."""
        self.members = [member for member in self.members if member != worker]
        self.waiting = [each for each in self.waiting if each != worker]
        self.parted.discard(worker)
        if self.released:  # one of them may stay in the place of the one who is lost
            self._release()

    def leave(self, worker: W) -> None:
        """A member is done, or cannot go on: the run ends."""
        self.over = self.over or worker in self.members
        self.lose(worker)

    def _release(self) -> None:
        too_many = (self.members + self.waiting)[self.wanted :]
        self.released = {worker for worker in too_many if worker in self.members}

    def next(self) -> list[W] | None:
        """Begin the next generation, if it can; its members by rank: first those who have the run's state."""
        if self.over or self.returning or len(self.parted) < len(self.members):
            return None
        together = [worker for worker in self.members + self.waiting if worker not in self.released]
        if len(together) < (self.needed if self.number >= 0 else self.wanted):
            return None
        self.number += 1
        self.members, self.parted, self.waiting, self.released, self.renew = together, set(), [], set(), False
        return together
