"""The group of a script whose members may change: it delegates to the group of the current generation.

A script has one `group` from `andon.init` to `close`. Its rank and world size are those of the current generation.
A worker that *joins* a run is alone until it enters the run's next generation, in `model.steps`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from andon.engine.gradients.order import Order
from andon.transport.base import Group, Units

if TYPE_CHECKING:
    import torch

Loop = tuple[int, int, int]
"""A loop over steps (`model.steps`): the number of loops that the script has begun with it, the difference between its
step numbers and those of the run, and its end."""


class ChangingGroup(Group):
    """Delegates every operation to the group of the current generation."""

    def __init__(self, now: Group, joins: bool) -> None:
        self.joins = joins
        self.loop: Loop = (0, 0, 0)
        """The loop over steps that began last."""
        self.in_loop = False
        """Whether it has not come to its end: not after its last step, but after a `break` or an error."""
        self.reduced_alone = False
        """Whether a worker that joins has reduced a tensor by itself, which the others did together."""
        self.reported = 0
        """The last step that rank 0 has reported to the ledger; the other ranks count along."""
        self.become(now)

    @abstractmethod
    def go_on(self, optimizer: Any, why: Exception | None) -> None:
        """Leave the group, if there is one, enter the next generation, and bring the optimizer to the step of its
        ranks; `GroupError` if there is none."""

    @abstractmethod
    def report(self, records: Sequence[Any]) -> None:
        """Report committed steps to the run's ledger."""

    @abstractmethod
    def went_back(self, generation: int, step: int) -> None:
        """Report to the ledger that a generation continues from the checkpoint of a step."""

    @abstractmethod
    def publish_loop(self) -> None:
        """Tell workers that join later, when nobody else may be left, in which loop the run is."""

    def begin_loop(self, offset: int, end: int) -> None:
        """The script begins a loop over steps."""
        self.loop, self.in_loop = (self.loop[0] + 1, offset, end), True
        if not self.joins:
            self.publish_loop()

    def become(self, now: Group) -> None:
        """Delegate to the group of another generation."""
        self.now = now
        self.rank, self.world_size, self.generation = now.rank, now.world_size, now.generation
        self.transport, self.wire, self.mixed = now.transport, now.wire, now.mixed

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        self.now.reduce_scatter(nodes, bounds, order)

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        self.now.all_gather(flat, bounds)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.now.all_gather_bytes(data)

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        self.reduced_alone |= self.joins
        self.now.all_reduce(nodes, order)

    def exchange_order(self, units: Units) -> Sequence[int]:
        return self.now.exchange_order(units)

    def allocate(self, rows: int, size: int) -> torch.Tensor:
        return self.now.allocate(rows, size)

    def abort(self, rank: int, detail: str) -> None:
        self.now.abort(rank, detail)

    def leave(self) -> None:
        self.now.leave()
