"""Data-parallel training of any module: parameters in an arena, gradients exchanged while backward computes.

Units are found by a rule (`engine.arena.backward_order`): each child of the longest module list is a block.
Only parameters that require gradients take part, so a LoRA model exchanges its adapters alone. A module whose
parameters are bf16 is trained on an f32 master, taken from them when it is handed over.
"""

from typing import Any, Literal

from torch import Tensor, nn

from andon.engine.accumulate import Accumulator
from andon.engine.arena import Arena
from andon.engine.exchange import Exchange
from andon.engine.gather import Gather
from andon.engine.membership import Membership
from andon.engine.phases import Phases
from andon.transport.base import Group


class DataParallel(nn.Module):
    """A module that is trained alike on every rank of a group; rank 0's weights are everyone's first ones.

    A step has `slots` micro-batches, shared out among the ranks. `overlap_gather` lets forward begin while updated
    weights still arrive; it is for modules that use a unit's weights only by calling the unit's module."""

    def __init__(self, module: nn.Module, group: Group, slots: int, overlap_gather: bool = False) -> None:
        super().__init__()
        self.module = module
        self.membership = Membership.of(group, slots)
        self.phases = Phases()
        on_cpu = next(module.parameters()).device.type == "cpu"
        self.arena = Arena(module, (lambda size: group.allocate(1, size)[0]) if on_cpu else None)
        group.broadcast(self.arena.weights, src=0)
        self.exchange = Exchange(self.arena, self.membership)
        self.gradients = Accumulator(self.arena, self.membership, self.exchange)
        self.gather = Gather(self.arena, self.membership, self.exchange.thread)
        self.gather.hook(module, overlap_gather)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own forward."""
        return self.module(*inputs, **named)

    @property
    def slots(self) -> range:
        """This rank's share of the step's slots."""
        return self.membership.slots

    @property
    def group(self) -> Group:
        """The group, free for another collective: weights that are still being gathered are waited for."""
        self.arena.wait_for_weights()
        return self.membership.group

    def backward(self, loss: Tensor, count: int, reduction: Literal["mean", "sum"] = "mean") -> None:
        """Backward of the next slot's loss: the mean over its `count` tokens (or samples), or their sum.

        A step's gradient is the mean over all tokens of all its slots, on every rank."""
        self.gradients.backward(loss * count if reduction == "mean" else loss, count)

    def close(self) -> None:
        """Wait for weights that are on their way, stop the thread and let go of the module.

        The group stays open for whoever opened it."""
        try:
            self.arena.wait_for_weights()
        finally:
            self.exchange.close()
            self.gradients.close()
