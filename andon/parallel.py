"""The Python door: data-parallel training of any module, with the same checks as `andon train`.

    group = andon.join()                                  # torchrun's ranks; alone, a group of one
    parallel = andon.DataParallel(model, group, slots=8)
    for step in range(1, steps + 1):
        for slot in parallel.slots:                       # my share of the step's 8 micro-batches
            x, y = batch(step, slot)
            loss = cross_entropy(model(x), y, reduction="sum")
            parallel.backward(loss, slot, tokens=y.numel())
        totals = parallel.step(lr=3e-4)                   # exchange, verdict, update, proof; or JidokaHalt

Units are found by a rule (`andon.arena.backward_order`): each child of the longest module list is a block.
Only parameters that require gradients take part, so a LoRA model exchanges its adapters alone.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from andon.arena import Arena
from andon.gradients import Gradients, OnGradient, Totals
from andon.group.base import Group
from andon.integrity.fingerprint import Fingerprints
from andon.integrity.halt import JidokaHalt
from andon.optim.adamw import AdamW, Settings


class DataParallel:
    """A module whose parameters live in an arena and are trained alike on every rank of a group."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        slots: int,
        settings: Settings | None = None,
        on_gradient: OnGradient | None = None,
    ) -> None:
        self.model, self.group = model, group
        self.arena = Arena(model)
        group.broadcast(self.arena.weights, src=0)
        self.gradients = Gradients(self.arena, group, slots, on_gradient)
        self.optimizer = AdamW(self.arena, settings or Settings())
        self.moments = {"first": self.optimizer.first, "second": self.optimizer.second}
        self.state = {"weights": self.arena.weights, **self.moments}
        self.fingerprints = Fingerprints(self.arena, self.state, group)
        self.slots = self.gradients.slots
        self.steps_done = 0

    def backward(self, loss: Tensor, slot: int, tokens: int) -> None:
        """Backward of one slot's loss, summed over its tokens (or samples)."""
        self.gradients.backward(loss, slot, tokens)

    def step(self, lr: float, clip: float = 1.0) -> Totals:
        """End a step: agree with all ranks, halt if something is wrong, update, and compare what came out."""
        step = self.steps_done + 1
        totals = self.gradients.finish()
        if not totals.sound:
            raise JidokaHalt(step, totals.complaint)
        self.update(totals, lr, clip)
        self.fingerprints.compare(step, f"{step} {lr} {clip}")
        self.steps_done = step
        return totals

    def update(self, totals: Totals, lr: float, clip: float) -> None:
        """AdamW on the mean gradient, clipped to a global norm (0: not clipped)."""
        scale = totals.tokens * max(1.0, totals.norm / clip if clip else 1.0)
        self.optimizer.step(self.gradients.total, scale, lr)

    def close(self) -> None:
        """Let go of the model and the group."""
        self.gradients.close()
        self.group.close()


def join(timeout: float = 60.0) -> Group:
    """The group of this process: torchrun's ranks, or a group of one."""
    if "WORLD_SIZE" not in os.environ:
        from andon.group.local import LocalGroup

        return LocalGroup()
    import torch.distributed as dist

    from andon.group.torch_dist import TorchGroup

    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return TorchGroup(None, timeout, owned=mine)
