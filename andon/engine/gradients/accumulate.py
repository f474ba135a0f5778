"""Backward into the arena: each slot's gradients are folded into the worker's rows in the one order of addition.

A worker folds its slots as `engine.gradients.order` says: a slot's gradient goes to a *row*, then rows are merged. In
its last slot a unit is *ready* when every parameter of it has its gradient. Ready units are handed over in layout
order, with the merges that are left, so that the exchange goes on while backward computes the units after them.

With bf16 on the wire every gradient and every merge is rounded to bf16, whether it travels or not: then the sum does
not depend on which of them do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from andon.engine.gradients.arena import Arena, set_grad_out
from andon.engine.gradients.exchange import Exchange
from andon.engine.gradients.order import Fold
from andon.engine.membership import Membership
from andon.transport.rows import round_as

OnGradient = Callable[[int, str, Tensor], None]
"""Called with the slot, the parameter's name and its fresh gradient."""
Inspect = Callable[[str, Tensor], Any]
"""Called with a parameter's name and its fresh gradient."""


@dataclass(frozen=True)
class SlotLoss:
    """The loss of one slot, summed over its `count` tokens (or samples)."""

    slot: int
    loss: Tensor
    count: int


class _OnItsWay(Tensor):
    """`grad` of a parameter between its backward and the end of the step, without memory: whoever uses it learns why
    that cannot be."""

    @staticmethod
    def __new__(cls, shape: torch.Size, device: torch.device) -> "_OnItsWay":
        made: _OnItsWay = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "the gradients are on their way to the other ranks: call backward of the DataParallel model, clip with "
            "optimizer.step(clip=...), and read them after the step"
        )


class Accumulator:
    """The gradients of one worker's slots, in `rows`; a unit that is ready there belongs to the exchange."""

    def __init__(self, arena: Arena, membership: Membership, exchange: Exchange) -> None:
        self.arena, self.membership, self.exchange = arena, membership, exchange
        self.rows = _allocate(arena, membership)
        self.losses: list[SlotLoss] = []
        """The slots of this step that are done."""
        self.on_gradient: OnGradient | None = None
        self.wire = membership.group.wire
        folds = membership.order.folds(membership.rank, accumulate=self.wire == "f32")
        self._folds = {fold.slot: fold for fold in folds}
        self._views = [arena.layout.views(row) for row in self.rows]
        self._on_its_way = {name: _OnItsWay(piece.shape, arena.device) for name, piece in arena.layout.slices.items()}
        self._backward: _Backward | None = None
        self._inspection: tuple[int, Inspect] | None = None
        self._failed = False
        self._hooks = [
            arena.parameters[piece.name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(index, piece.name)
            )
            for index, unit in enumerate(arena.layout.units)
            for piece in unit.slices
        ]

    @property
    def next_slot(self) -> int | None:
        """The slot whose backward is due; None: all have had theirs."""
        slots, done = self.membership.slots, len(self.losses)
        return slots[done] if done < len(slots) else None

    def backward(self, loss: Tensor, count: int) -> None:
        """Backward of the next slot's summed loss; the last slot's hands over the units."""
        slot = self._due_slot()
        if slot is None:
            raise ValueError(f"all {len(self.membership.slots)} slots of this step are done: end the step")
        if not self.exchange.has_owners:
            raise ValueError("the model has no optimizer yet: make one first, such as andon.AdamW(model)")
        fold = self._folds[slot]
        for name, parameter in self.arena.parameters.items():
            view = self._views[fold.row][name]
            parameter.grad = view if fold.accumulate else None
            set_grad_out(parameter, None if fold.accumulate else view)
        self._backward = _Backward(self, fold, last=slot == self.membership.slots[-1])
        self._failed = True
        loss.backward()  # type: ignore[no-untyped-call]
        self._backward.complete()
        self._backward, self._failed = None, False
        for name, parameter in self.arena.parameters.items():
            parameter.grad = self._on_its_way[name]
        self.losses.append(SlotLoss(slot, loss.detach(), count))

    def end_step(self) -> list[SlotLoss]:
        """All slots are done: their losses; `grad` of every parameter is its view into the first row."""
        if (slot := self._due_slot()) is not None:
            raise ValueError(f"the step ends, but slot {slot} has had no backward")
        for name, parameter in self.arena.parameters.items():
            parameter.grad = self._views[0][name]
        losses, self.losses = self.losses, []
        return losses

    def _due_slot(self) -> int | None:
        if self._failed:
            raise RuntimeError("an earlier backward failed in the middle: the gradients of this step are lost")
        return self.next_slot

    def inspect(self, loss: Tensor, slot: int, look: Inspect) -> list[Any]:
        """Backward of a slot again, only to look at each parameter's gradient; what `look` gave for each."""
        seen: list[Any] = []
        self._inspection = (slot, lambda name, gradient: seen.append(look(name, gradient)))
        for parameter in self.arena.parameters.values():
            parameter.grad = None
            set_grad_out(parameter, None)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._inspection = None
        return seen

    def close(self) -> None:
        """Let go of the model."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, unit: int, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
            if self._inspection is not None:
                slot, look = self._inspection
                if self.on_gradient:
                    self.on_gradient(slot, name, parameter.grad)
                look(name, parameter.grad)
                parameter.grad = None
            elif self._backward is None:
                raise RuntimeError("call backward of the DataParallel model, not of the loss")
            else:
                self._backward.arrived(unit, name, parameter)

        return hook


class _Backward:
    """One slot's backward: which gradients have arrived, which units were handed over."""

    def __init__(self, accumulator: Accumulator, fold: Fold, last: bool) -> None:
        self._accumulator, self._fold, self._last = accumulator, fold, last
        self._views = accumulator._views[fold.row]
        self._missing = [{piece.name for piece in unit.slices} for unit in accumulator.arena.layout.units]
        self._handed_over = 0

    def arrived(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        """A parameter has its gradient: put it into the row and hand over what is ready."""
        if name not in self._missing[unit]:
            raise ValueError(
                f"{name} got its gradient twice in one backward: checkpoint with use_reentrant=False the modules that "
                "share it"
            )
        view = self._views[name]
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = None
        round_as(self._accumulator.wire, view)
        if self._accumulator.on_gradient:
            self._accumulator.on_gradient(self._fold.slot, name, view)
        self._accumulator.exchange.note_gradient(self._fold.slot, name, view)
        self._missing[unit].discard(name)
        self._hand_over()

    def complete(self) -> None:
        """Backward is over: a parameter without a gradient counts as zero."""
        for names in self._missing:
            if not self._fold.accumulate:
                for name in names:
                    self._views[name].zero_()
            names.clear()
        self._hand_over()
        if not self._last:
            for into, other in self._fold.merges:
                rows = self._accumulator.rows
                round_as(self._accumulator.wire, rows[into].add_(rows[other]))

    def _hand_over(self) -> None:
        while self._last and self._handed_over < len(self._missing) and not self._missing[self._handed_over]:
            self._accumulator.exchange.submit(self._handed_over, self._fold.merges, self._accumulator.rows)
            self._handed_over += 1


def _allocate(arena: Arena, membership: Membership) -> Tensor:
    """Gradient rows: on the CPU where the transport exchanges best, on a GPU on the same device as the weights."""
    rows = membership.order.rows(membership.rank, accumulate=membership.group.wire == "f32")
    if arena.device.type == "cpu":
        return membership.group.allocate(rows, arena.layout.size)
    return torch.zeros(rows, arena.layout.size, device=arena.device)
