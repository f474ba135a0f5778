"""The group of a script whose members may change: it delegates to the group of the current generation.

A script has one `group` from `andon.init` to `close`. Its rank and world size are those of the current generation.
A worker that *joins* a run is alone until it enters the run's next generation, in `model.steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from andon.engine.gradients.order import Order
from andon.transport.base import Group, Units

if TYPE_CHECKING:
    import torch

GoOn = Callable[[Any, Exception | None], None]
"""(optimizer, why): leave the group, enter the next generation, and bring the optimizer to the step of its ranks."""
Report = Callable[[Sequence[Any]], None]
"""Reports committed steps to the run's ledger."""
WentBack = Callable[[int, int], None]
"""(generation, step): reports to the ledger that a generation continues from the checkpoint of a step."""
Loop = tuple[int, int, int]
"""A loop over steps (`model.steps`): the number of loops that the script has begun with it, the difference between its
step numbers and those of the run, and its end."""
BeginLoop = Callable[[Loop], None]
"""Tells workers that join later, when nobody else may be left, in which loop the run is."""


class ChangingGroup(Group):
    """Delegates every operation to the group of the current generation."""

    def __init__(
        self, now: Group, go_on: GoOn, report: Report, went_back: WentBack, begin_loop: BeginLoop, joins: bool
    ) -> None:
        self.go_on, self.report, self.went_back, self.joins = go_on, report, went_back, joins
        self._begin_loop = begin_loop
        self.loop: Loop = (0, 0, 0)
        """The loop over steps that began last."""
        self.in_loop = False
        """Whether it has not come to its end: not after its last step, but after a `break` or an error."""
        self.reduced_alone = False
        """Whether a worker that joins has reduced a tensor by itself, which the others did together."""
        self.reported = 0
        """The last step that rank 0 has reported to the ledger; the other ranks count along."""
        self.become(now)

    def begin_loop(self, offset: int, end: int) -> None:
        """The script begins a loop over steps."""
        self.loop, self.in_loop = (self.loop[0] + 1, offset, end), True
        if not self.joins:
            self._begin_loop(self.loop)

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
