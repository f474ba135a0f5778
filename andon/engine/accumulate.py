"""Gradients: backward into the arena, folded over slots, exchanged unit by unit while backward goes on.

Each worker folds its slots in the order of `engine.order`. In its last slot a unit is *ready* when every
parameter of it has its gradient; ready units leave in layout order, on one communication thread, which first
does the fold's remaining merges for that unit, looks whether what it contributes is finite, does the reduce,
and takes the norm of what this rank owns. `finish` waits for the last unit and tells what all ranks now agree
on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from andon.engine.arena import CELL, Arena, Unit, set_grad_out
from andon.engine.order import Fold, plan
from andon.optim.sharding import Ownership
from andon.transport.base import Group

LARGEST = 1e37
OnGradient = Callable[[int, str, Tensor], None]
"""Called with the slot, the parameter's name and its fresh gradient."""


@dataclass(frozen=True)
class Totals:
    """What a step came to, the same on every rank."""

    loss: float
    tokens: int
    norm: float
    stop: bool
    bad_units: tuple[tuple[int, str], ...] = ()
    """(rank, unit) of every contribution that was not finite."""
    words: tuple[Any, ...] = ()
    """What each rank said besides, by rank."""

    @property
    def sound(self) -> bool:
        return not self.bad_units and math.isfinite(self.norm) and math.isfinite(self.loss)

    @property
    def complaint(self) -> str:
        """Why a step is not sound, in one line."""
        if self.bad_units:
            return "; ".join(
                f"rank {rank} computed a bad gradient of {unit}" for rank, unit in self.bad_units
            )
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        return f"every contribution is finite, but the norm of their sum is {self.norm}"


class Gradients:
    """The summed gradients of a step; after `finish`, `total` holds the sums of what this rank owns."""

    def __init__(
        self,
        arena: Arena,
        group: Group,
        slots: int,
        ownership: Ownership,
        on_gradient: OnGradient | None = None,
    ) -> None:
        self.arena, self.group, self.ownership, self.on_gradient = arena, group, ownership, on_gradient
        self.order = plan(slots, group.world_size)
        self.slots = self.order.range_of(group.rank)
        self.rows = _buffers(arena, group, self.order.rows(group.rank))
        self.total = self.rows[0]
        self.views = [{name: arena.layout.view(row, name) for name in arena.parameters} for row in self.rows]
        self._folds = {fold.slot: fold for fold in self.order.folds(group.rank)}
        self._losses: dict[int, tuple[Tensor, int]] = {}
        self._bad: list[str] = []
        self._broken = False
        self._scatters = ownership.shared and ownership.replicas == 1
        self.looks_ahead = not (self._scatters and group.keeps_rows)
        """Whether to look at contributions before the reduce, because they could not be looked at later."""
        self._sums = arena.zeros(len(self.slots) * len(arena.parameters)).view(len(self.slots), -1)
        """The sum of each gradient after each slot: a value that is not finite makes it so."""
        self._places = {name: at for at, name in enumerate(arena.layout.slices)}
        self.exchange_seconds = 0.0
        """How long the collectives of this step took, most of it beside backward."""
        self._cells = torch.zeros(arena.layout.size // CELL, device=arena.device)
        spans = [ownership.spans(rank) for rank in range(group.world_size)]
        ends = list(accumulate((hi - lo) // CELL for each in spans for lo, hi in each))
        self._cell_bounds = [0, *ends[len(arena.layout.units) - 1 :: len(arena.layout.units)]]
        self._cell_order = np.argsort(
            np.concatenate([np.arange(lo // CELL, hi // CELL) for each in spans for lo, hi in each])
        )
        starts = [0, *ends][group.rank * len(arena.layout.units) :]
        self._spans = [(lo, hi, at) for (lo, hi), at in zip(spans[group.rank], starts, strict=False)]
        """For each unit: the range whose norm this rank computes, and where in the cells it belongs."""
        self.thread = ThreadPoolExecutor(
            1, "andon-exchange", initializer=_same_threads(torch.get_num_threads())
        )
        self._backward: Backward | None = None
        self._inspection: tuple[int, Callable[[str, Tensor], None]] | None = None
        self._hooks = [
            arena.parameters[piece.name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(index, piece.name)
            )
            for index, unit in enumerate(arena.layout.units)
            for piece in unit.slices
        ]

    def backward(self, loss: Tensor, slot: int, tokens: int) -> None:
        """Backward of one slot's summed loss; slots come in order, the last one starts the exchange."""
        self._check_turn(slot)
        fold = self._folds[slot]
        if slot == self.slots[0]:
            self._bad, self.exchange_seconds = [], 0.0
            self._sums.zero_()
        self._backward = Backward(self, fold, last=slot == self.slots[-1])
        for name, parameter in self.arena.parameters.items():
            view = self.views[fold.row][name]
            parameter.grad = view if fold.accumulate else None
            set_grad_out(parameter, None if fold.accumulate else view)
        self._broken = True
        loss.backward()  # type: ignore[no-untyped-call]
        self._backward.complete()
        self._broken = False
        self._losses[slot] = (loss.detach(), tokens)

    def _check_turn(self, slot: int | None) -> None:
        """Every slot has its turn once, in order, and then `finish` (None)."""
        if self._broken:
            raise RuntimeError(
                "an earlier backward failed in the middle: these gradients cannot be used any more"
            )
        done = len(self._losses)
        due = self.slots[done] if done < len(self.slots) else None
        if slot != due:
            names = ("the end of the step" if each is None else f"slot {each}" for each in (slot, due))
            raise ValueError("{} came where {} was due".format(*names))

    def finish(self, stop: bool = False, word: Any = None) -> Totals:
        """Wait for the exchange and agree on what the step came to; a rank may send a word (JSON) along."""
        self._check_turn(None)
        assert self._backward is not None
        for exchange in self._backward.exchanges:
            exchange.result()
        for name, parameter in self.arena.parameters.items():
            parameter.grad = self.views[0][name]
        losses = [(slot, self._losses[slot][0].item(), self._losses[slot][1]) for slot in self.slots]
        self._losses.clear()
        words = self.group.all_gather_bytes(json.dumps([stop, self._bad, losses, word]).encode())
        everyone = [json.loads(word) for word in words]
        slots = sorted(record for _, _, records, _ in everyone for record in records)
        tokens = sum(count for _, _, count in slots)
        norm = self._norm() / max(1, tokens)
        bad = [(rank, unit) for rank, (_, units, *_) in enumerate(everyone) for unit in units]
        return Totals(
            loss=sum(loss for _, loss, _ in slots) / max(1, tokens),
            tokens=tokens,
            norm=norm,
            stop=any(wanted for wanted, *_ in everyone),
            bad_units=tuple(bad if self.looks_ahead or math.isfinite(norm) else self._look_back()),
            words=tuple(said for *_, said in everyone),
        )

    def _look_back(self) -> list[tuple[int, str]]:
        """Whose contribution to which unit was not finite, told from the rows that the reduce left alone.

        An owner cannot see its own part of its first row any more: if its sum there is bad and nobody else's
        part is, it was its own."""
        rank, units = self.group.rank, self.arena.layout.units
        rows = self.rows[: len(self.order.nodes[rank])]
        bad, sums = [], []
        for owner in range(self.group.world_size):
            for unit, (lo, hi) in enumerate(self.ownership.spans(owner)):
                if not _is_finite(rows[1 if owner == rank else 0 :, lo:hi]):
                    bad.append((unit, owner))
                if owner == rank and not _is_finite(self.total[lo:hi]):
                    sums.append(unit)
        words = self.group.all_gather_bytes(json.dumps([bad, sums]).encode())
        everyone = [json.loads(word) for word in words]
        blamed = {(who, unit) for who, (found, _) in enumerate(everyone) for unit, _ in found}
        known = {(unit, owner) for found, _ in everyone for unit, owner in found}
        for owner, (_, found) in enumerate(everyone):
            blamed |= {(owner, unit) for unit in found if (unit, owner) not in known}
        return [(who, units[unit].name) for who, unit in sorted(blamed)]

    def inspect(self, loss: Tensor, slot: int, look: Callable[[str, Tensor], None]) -> None:
        """Backward of one slot again, only to look at each parameter's gradient."""
        self._inspection = (slot, look)
        for parameter in self.arena.parameters.values():
            parameter.grad = None
            set_grad_out(parameter, None)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._inspection = None

    def _norm(self) -> float:
        """The norm of the total, over cells in the order of the arena; each rank has done those it owns."""
        self.group.all_gather(self._cells, self._cell_bounds)
        by_rank = self._cells.cpu().numpy().astype(np.float64)
        cells = by_rank[self._cell_order]
        return float(np.sqrt(np.dot(cells, cells)))

    def _hook(self, unit: int, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if self._inspection is not None:
                slot, look = self._inspection
                if self.on_gradient:
                    self.on_gradient(slot, name, parameter.grad)
                look(name, parameter.grad)
                parameter.grad = None
                return
            assert self._backward is not None, "backward outside Gradients.backward"
            assert isinstance(parameter, nn.Parameter)
            self._backward.arrived(unit, name, parameter)

        return hook

    def _exchange(self, index: int, merges: tuple[tuple[int, int], ...], before: Future[None] | None) -> None:
        if before is not None:
            before.result()  # once a unit has failed, the rest fail with its error
        unit = self.arena.layout.units[index]
        rows = self.rows[:, unit.start : unit.stop]
        for into, other in merges:
            rows[into].add_(rows[other])
        mine = rows[: max(1, len(self.order.nodes[self.group.rank]))]
        if self.looks_ahead and not (self._sums_are_finite(unit) or _is_finite(mine)):
            self._bad.append(unit.name)
        started = time.perf_counter()
        if self._scatters and self.ownership.bounds:
            self.group.reduce_scatter(mine, self.ownership.bounds[index], self.order)
        else:
            self.group.all_reduce(mine, self.order)
        self.exchange_seconds += time.perf_counter() - started
        lo, hi, at = self._spans[index]
        norms = self._cells[at : at + (hi - lo) // CELL]
        torch.linalg.vector_norm(self.total[lo:hi].view(-1, CELL), dim=1, out=norms)

    def note_sum(self, slot: int, name: str, view: Tensor) -> None:
        """Keep the sum of a gradient. Not as a tensor of its own: a small one left among large ones that come
        and go keeps the allocator from joining what they free."""
        torch.sum(view.view(-1), 0, out=self._sums[slot - self.slots[0], self._places[name]])

    def _sums_are_finite(self, unit: Unit) -> bool:
        first = self._places[unit.slices[0].name]
        return bool(torch.isfinite(self._sums[:, first : first + len(unit.slices)]).all())

    def close(self) -> None:
        """Stop the communication thread and let go of the model."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        for hook in self._hooks:
            hook.remove()


class Backward:
    """One slot's backward: which gradients have arrived, which units have left."""

    def __init__(self, gradients: Gradients, fold: Fold, last: bool) -> None:
        self.gradients, self.fold, self.last = gradients, fold, last
        self.views = gradients.views[fold.row]
        self.missing = [{piece.name for piece in unit.slices} for unit in gradients.arena.layout.units]
        self.exchanges: list[Future[None]] = []

    def arrived(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        """A parameter's gradient is there: put it into the arena and send what is ready."""
        view = self.views[name]
        assert parameter.grad is not None
        if self.gradients.on_gradient:
            self.gradients.on_gradient(self.fold.slot, name, parameter.grad)
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = None
        if self.gradients.looks_ahead:
            self.gradients.note_sum(self.fold.slot, name, view)  # while the cache still holds it
        self.missing[unit].discard(name)
        self._send_ready()

    def complete(self) -> None:
        """Backward is over: a parameter without a gradient counts as zero."""
        for names in self.missing:
            if not self.fold.accumulate:
                for name in names:
                    self.views[name].zero_()
            names.clear()
        self._send_ready()
        if not self.last:
            for into, other in self.fold.merges:
                self.gradients.rows[into].add_(self.gradients.rows[other])

    def _send_ready(self) -> None:
        units = self.gradients.arena.layout.units
        while self.last and len(self.exchanges) < len(units) and not self.missing[len(self.exchanges)]:
            before = self.exchanges[-1] if self.exchanges else None
            unit, merges = len(self.exchanges), self.fold.merges
            task = self.gradients.thread.submit(self.gradients._exchange, unit, merges, before)
            self.exchanges.append(task)


def _buffers(arena: Arena, group: Group, rows: int) -> Tensor:
    """Gradient buffers: on the CPU where the transport exchanges best, on a GPU beside the weights."""
    if arena.device.type == "cpu":
        return group.allocate(rows, arena.layout.size)
    return torch.zeros(rows, arena.layout.size, device=arena.device)


def _is_finite(values: Tensor) -> bool:
    """Whether every value is finite, and far from where a sum of several would not be."""
    return not values.numel() or bool(values.abs().amax() < LARGEST)


def _same_threads(count: int) -> Callable[[], None]:
    """A new thread starts with torch's default number of compute threads: give it the worker's."""
    return lambda: torch.set_num_threads(count)
