"""The exchange of gradients: one thread reduces the units of a step, one after the other, in layout order.

For each unit it does the remaining merges, checks this rank's contribution if it cannot be checked later
(`integrity.finite`), reduces it over the group, and takes the norm of every cell that this rank owns. Once a unit has
failed, the units after it fail with its error. Updated weights are gathered on the same thread
(`engine.gradients.gather`), so that the group never runs two collectives at once.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from andon.engine.gradients.arena import CELL, Arena
from andon.engine.gradients.order import Merges
from andon.engine.membership import Membership
from andon.integrity.finite import GradientSums, blame_after_reduce, is_finite
from andon.optim.sharding import Ownership
from andon.transport.registry import TRANSPORTS
from andon.transport.rows import round_as


class Passenger(Protocol):
    """A component whose status is part of every step's exchange (JSON), such as a save in progress."""

    def status(self) -> Any:
        """This rank's status."""
        ...

    def receive(self, statuses: Sequence[Any]) -> None:
        """Take the statuses of all ranks, by rank; the same list on every rank."""
        ...


def _set_up_thread(threads: int, device: torch.device) -> None:
    """Replace a new thread's defaults: torch's number of compute threads, and the first GPU."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Exchange:
    """Reduces the units of every step, on a separate thread."""

    def __init__(self, arena: Arena, membership: Membership) -> None:
        self.arena, self.membership = arena, membership
        self.seconds = 0.0
        """How long the collectives of this step took, most of it while backward computed."""
        self.checks = True
        """Off only in benchmarks that measure the cost of the checks."""
        set_up = partial(_set_up_thread, torch.get_num_threads(), arena.device)
        self.thread = ThreadPoolExecutor(1, "andon-exchange", initializer=set_up)
        self.has_owners = False
        """Whether an optimizer has decided who gets which part of the gradients."""
        self._sums = GradientSums(arena, membership.slots)
        self._tasks: list[Future[None]] = []
        self._ready: dict[int, tuple[Merges, Tensor]] = {}
        self._bad: list[str] = []
        units = arena.layout.units
        self._turns = membership.group.exchange_order([(unit.name, unit.sizes) for unit in units])
        self._transport = TRANSPORTS[membership.group.transport]
        self._alone = membership.world_size == 1 and not self._transport.joins_server
        """No other rank adds to the gradients: a bad sum is this rank's, and there is nothing to wait for."""

    def own(self, ownership: Ownership) -> None:
        """Set who gets which part of every reduced gradient."""
        self.ownership = ownership
        self._scatters = ownership.sharded and ownership.replicas == 1
        checks_afterwards = self._alone or (self._scatters and self._transport.reduce_preserves_inputs)
        self._checks_before_reduce = not checks_afterwards
        self._cells = _OwnedCells(self.arena, self.membership, ownership)
        self.has_owners = True

    def note_gradient(self, slot: int, name: str, gradient: Tensor) -> None:
        """Sum a complete gradient for the check, while it is still in the processor's cache."""
        if self.checks and self._checks_before_reduce:
            self._sums.note(slot, name, gradient)

    def submit(self, unit: int, merges: Merges, rows: Tensor) -> None:
        """Reduce a unit that is ready in this rank's rows, after the units before it."""
        self._ready[unit] = (merges, rows)
        while len(self._tasks) < len(self._turns) and (turn := self._turns[len(self._tasks)]) in self._ready:
            self._begin(turn, *self._ready.pop(turn))

    def _begin(self, unit: int, merges: Merges, rows: Tensor) -> None:
        before = self._tasks[-1] if self._tasks else None
        self.seconds = self.seconds if before else 0.0
        if self._alone or len(self.arena.layout.units) == 1:
            self._tasks.append(_Later(self._reduce, unit, merges, rows, before))
            if self._alone and rows.is_cuda:
                self._tasks[-1].result()  # only launches work, which runs during backward
        else:
            self._tasks.append(self.thread.submit(self._reduce, unit, merges, rows, before))

    def wait(self) -> list[str]:
        """Wait until all units are reduced; gives the units to which this rank's contribution is known to be bad."""
        for task in self._tasks:
            task.result()
        bad, self._bad, self._tasks = self._bad, [], []
        self._sums.reset()
        return bad

    def norm(self) -> Tensor:
        """The norm of the whole reduced gradient, the same bits on every rank: one f64, on the device."""
        return self._cells.norm()

    def blame(self, seen: tuple[tuple[int, str], ...], rows: Tensor) -> tuple[tuple[int, str], ...]:
        """(rank, unit) of every bad contribution to a sum that is not finite; `seen`: those found before the reduce."""
        if self._checks_before_reduce:
            return seen
        mine = rows[: len(self.membership.order.nodes[self.membership.rank])]
        return tuple(blame_after_reduce(self.membership.group, self.ownership, mine, rows[0]))

    def _reduce(self, index: int, merges: Merges, rows: Tensor, before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        unit, membership = self.arena.layout.units[index], self.membership
        mine = rows[:, unit.start : unit.stop]
        for into, other in merges:
            round_as(membership.group.wire, mine[into].add_(mine[other]))
        mine = mine[: max(1, len(membership.order.nodes[membership.rank]))]
        if self.checks and self._checks_before_reduce and not self._sums.are_finite(unit):
            self._bad += [] if is_finite(mine) else [unit.name]
        started = time.perf_counter()
        if self._scatters and self.ownership.bounds:
            membership.group.reduce_scatter(mine, self.ownership.bounds[index], membership.order)
        else:
            membership.group.all_reduce(mine, membership.order)
        self.seconds += time.perf_counter() - started
        self._cells.measure(index, rows[0])

    def close(self) -> None:
        """Stop the thread."""
        self.thread.shutdown(wait=True, cancel_futures=True)


class _Later(Future[None]):
    """Work that is done when its result is asked for, on the caller's thread."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        super().__init__()
        self._work = partial(work, *arguments)

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            try:
                self.set_result(self._work())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)


class _OwnedCells:
    """The norm of each cell of the arena, computed by its owner and gathered in one order."""

    def __init__(self, arena: Arena, membership: Membership, ownership: Ownership) -> None:
        self.membership = membership
        self._norms = torch.zeros(arena.layout.size // CELL, device=arena.device)
        spans = [ownership.spans(rank) for rank in range(membership.world_size)]
        units = len(arena.layout.units)
        ends = list(accumulate((hi - lo) // CELL for each in spans for lo, hi in each))
        self._bounds = [0, *ends[units - 1 :: units]]
        by_rank = [np.arange(lo // CELL, hi // CELL) for each in spans for lo, hi in each]
        self._arena_order = torch.from_numpy(np.argsort(np.concatenate(by_rank))).to(arena.device)
        starts = [0, *ends][membership.rank * units :]
        self._spans = [(lo, hi, at) for (lo, hi), at in zip(spans[membership.rank], starts, strict=False)]
        """For each unit: the range that this rank measures, and the index of its first cell among the norms."""
        self._units = arena.layout.units
        on_gpu = arena.device.type == "cuda"
        self._stream = torch.cuda.Stream(arena.device) if on_gpu else None  # type: ignore[no-untyped-call]

    def measure(self, unit: int, total: Tensor) -> None:
        """Take the norms of the cells that this rank owns in a reduced unit."""
        lo, hi, at = self._spans[unit]
        norms = self._norms[at : at + (hi - lo) // CELL]
        if self._stream:
            # The order in which a GPU sums a row depends on the number of rows, so it always gets the whole unit.
            start, stop = self._units[unit].start, self._units[unit].stop
            self._stream.wait_stream(torch.cuda.current_stream(total.device))
            with torch.cuda.stream(self._stream):
                whole = torch.linalg.vector_norm(total[start:stop].view(-1, CELL), dim=1)
                norms.copy_(whole[(lo - start) // CELL : (hi - start) // CELL])
        else:
            torch.linalg.vector_norm(total[lo:hi].view(-1, CELL), dim=1, out=norms)

    def norm(self) -> Tensor:
        """The norm over all cells, added up in the order of the arena: one f64, on the device."""
        if self._stream:
            torch.cuda.current_stream(self._norms.device).wait_stream(self._stream)
        if self.membership.world_size > 1:
            self.membership.group.all_gather(self._norms, self._bounds)
        cells = self._norms.double()[self._arena_order]
        return sum_in_halves(cells * cells).sqrt()


def sum_in_halves(values: Tensor) -> Tensor:
    """The sum in an order that depends on the length only, not on the device or its libraries."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values[: len(values) - half] += values[half:]
        values = values[:half]
    return values.sum()
