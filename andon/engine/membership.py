"""A worker's place in the run: which generation, with whom, and which slots of every step are its own.

Whatever depends on who takes part is built from a membership and asks it for the group. When the members of a
run change, the membership is replaced as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from andon.engine.gradients.order import Order, make_order
from andon.transport.base import Group


class MembersChange(Exception):
    """The step is done, and somebody waits to join: all leave their group and go on as another generation."""


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
