"""Backward into the arena: each slot's gradients are folded into the worker's rows in the one order of addition.

A worker folds its slots as `engine.gradients.order` defines: a slot's gradient goes to a *row*, then rows are merged.
In the last slot a unit is *ready* when all its parameters have their gradients. Ready units are submitted to the
exchange in layout order, with the remaining merges, so that they are reduced while backward computes the next units.

With bf16 on the wire every gradient and every merge is rounded to bf16, whether it is sent or not: so the sum does not
depend on which of them are sent.
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


class _Unavailable(Tensor):
    """The `grad` of a parameter between its backward and the end of the step: no memory, any use raises an error."""

    @staticmethod
    def __new__(cls, shape: torch.Size, device: torch.device) -> "_Unavailable":
        made: _Unavailable = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "the gradients are being exchanged with the other ranks: call backward of the DataParallel model, clip "
            "with optimizer.step(clip=...), and read them after the step"
        )


class Accumulator:
    """Collects the gradients of one worker's slots in `rows`; a unit that is ready belongs to the exchange."""

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
        self._unavailable = {
            name: _Unavailable(piece.shape, arena.device) for name, piece in arena.layout.slices.items()
        }
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
        """The slot whose backward is due; None: all are done."""
        slots, done = self.membership.slots, len(self.losses)
        return slots[done] if done < len(slots) else None

    def backward(self, loss: Tensor, count: int) -> None:
        """Backward of the next slot's summed loss; in the last slot the units are submitted."""
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
            parameter.grad = self._unavailable[name]
        self.losses.append(SlotLoss(slot, loss.detach(), count))

    def end_step(self) -> list[SlotLoss]:
        """Give the losses of all slots; `grad` of every parameter becomes its view into the first row."""
        if (slot := self._due_slot()) is not None:
            raise ValueError(f"the step ends, but backward of slot {slot} was not called")
        for name, parameter in self.arena.parameters.items():
            parameter.grad = self._views[0][name]
        losses, self.losses = self.losses, []
        return losses

    def _due_slot(self) -> int | None:
        if self._failed:
            raise RuntimeError("a backward of this step failed halfway: the gradients of the step are lost")
        return self.next_slot

    def inspect(self, loss: Tensor, slot: int, look: Inspect) -> list[Any]:
        """Repeat the backward of a slot only to inspect it; gives the result of `look` for each parameter."""
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
        """Remove the hooks from the model."""
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
                self._backward.add_gradient(unit, name, parameter)

        return hook


class _Backward:
    """One slot's backward: which gradients are missing, how many units were submitted."""

    def __init__(self, accumulator: Accumulator, fold: Fold, last: bool) -> None:
        self._accumulator, self._fold, self._last = accumulator, fold, last
        self._views = accumulator._views[fold.row]
        self._missing = [{piece.name for piece in unit.slices} for unit in accumulator.arena.layout.units]
        self._submitted = 0

    def add_gradient(self, unit: int, name: str, parameter: nn.Parameter) -> None:
        """Put a parameter's gradient into the row, and submit the units that are ready."""
        if name not in self._missing[unit]:
            raise ValueError(
                f"{name} got its gradient twice in one backward: if the modules that share it are checkpointed, "
                "checkpoint them with use_reentrant=False"
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
        self._submit_ready()

    def complete(self) -> None:
        """End the backward; the gradient of a parameter that got none is zero."""
        for names in self._missing:
            if not self._fold.accumulate:
                for name in names:
                    self._views[name].zero_()
            names.clear()
        self._submit_ready()
        if not self._last:
            for into, other in self._fold.merges:
                rows = self._accumulator.rows
                round_as(self._accumulator.wire, rows[into].add_(rows[other]))

    def _submit_ready(self) -> None:
        while self._last and self._submitted < len(self._missing) and not self._missing[self._submitted]:
            self._accumulator.exchange.submit(self._submitted, self._fold.merges, self._accumulator.rows)
            self._submitted += 1


def _allocate(arena: Arena, membership: Membership) -> Tensor:
    """Gradient rows: on the CPU in the memory from which the transport exchanges best, else on the weights' device."""
    rows = membership.order.rows(membership.rank, accumulate=membership.group.wire == "f32")
    if arena.device.type == "cpu":
        return membership.group.allocate(rows, arena.layout.size)
    return torch.zeros(rows, arena.layout.size, device=arena.device)
