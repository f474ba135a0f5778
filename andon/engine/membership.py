"""A worker's place in the run: its generation, its group, and its slots of every step.

Objects that depend on who takes part are built from a membership and get the group from it. When the members of a run
change, the membership is replaced as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.engine.gradients.order import Order, make_order
from andon.transport.base import Group


class MembersChange(Exception):
    """The step is done, and a worker is waiting to join or leave: all leave the group and enter another generation."""


@dataclass(frozen=True)
class Membership:
    """One worker's place in one generation of a run."""

    group: Group
    order: Order

    @classmethod
    def of(cls, group: Group, slots: int) -> Membership:
        """The membership of a group whose ranks share `slots` slots."""
        return cls(group, make_order(slots, group.world_size))

    @property
    def generation(self) -> int:
        return self.group.generation

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    @property
    def slots(self) -> range:
        """This worker's share of the step's slots."""
        return self.order.range_of(self.rank)
