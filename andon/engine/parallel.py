"""Data-parallel training of any module: parameters in an arena, gradients exchanged while backward computes.

Units are found by a rule (`engine.gradients.arena.backward_order`): each child of the longest module list is a block.
Only parameters that require gradients take part, so a LoRA model exchanges its adapters alone; the others must be equal
on every rank. If the parameters are bf16, the optimizer trains an f32 master copy of them, made at the start.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from blake3 import blake3
from torch import Tensor, nn

from andon.engine.gradients.accumulate import Accumulator
from andon.engine.gradients.arena import Arena
from andon.engine.gradients.exchange import Exchange
from andon.engine.gradients.gather import Gather
from andon.engine.gradients.slots import Buffers, Slots, seed_generators
from andon.engine.membership import Membership
from andon.engine.phases import Phases
from andon.engine.progress import Progress
from andon.engine.recovery.steps import StepEnder, steps
from andon.integrity.fingerprint import WIDTH, as_bytes, differences
from andon.integrity.halt import JidokaHalt
from andon.transport.base import Group
from andon.transport.changing import ChangingGroup


class DataParallel(nn.Module):
    """A module that is trained on every rank of a group, with the same weights; all start with those of rank 0.

    A step has `slots` micro-batches, divided among the ranks. The random generators of every slot are seeded from
    `seed`. `overlap_gather` lets forward begin while updated weights still arrive; it is for modules that use a unit's
    weights only by calling the unit's module."""

    def __init__(
        self, module: nn.Module, group: Group, slots: int, seed: int = 0, overlap_gather: bool = False
    ) -> None:
        super().__init__()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("no parameter of the module requires gradients: there is nothing to train")
        if group.exchanging:
            raise ValueError("another model exchanges over this group: close it first, or put both into one module")
        self.module, self.seed = module, seed
        self.progress = Progress()
        self.membership = Membership.of(group, slots)
        self.phases = Phases()
        self.optimizer: StepEnder | None = None
        self.before_step: Callable[[], None] = lambda: None
        """Called before the first slot of every step."""
        self.frozen = _compare_what_is_not_trained(module, group)
        """BLAKE3 of the parameters that are not trained; empty if all are."""
        self.arena = Arena(module, self._memory())
        group.broadcast(self.arena.weights, src=0)
        self._connect(before=None)
        self.gather = Gather(self.arena, self.membership, self.exchange.thread)
        self.gather.hook(module, overlap_gather)
        module.register_forward_pre_hook(lambda *_: self._begin_if_due())

    def _memory(self) -> Callable[[int], Tensor] | None:
        """Allocates the weights: on the CPU in the memory from which the transport exchanges best."""
        group = self.membership.group
        on_cpu = next(self.module.parameters()).device.type == "cpu"
        return (lambda size: group.allocate(1, size)[0]) if on_cpu else None

    def _connect(self, before: Buffers | None) -> None:
        """Build everything that depends on the membership; `before`: the buffers in the generation before."""
        group = self.membership.group
        self.exchange = Exchange(self.arena, self.membership)
        self.gradients = Accumulator(self.arena, self.membership, self.exchange)
        self.buffers_of_step = Buffers(self.module, self.membership, before)
        self._slot: int | None = None
        """The slot that has begun."""
        group.before_close.append(self.close)
        group.exchanging = True

    def enter(self, membership: Membership) -> None:
        """Enter another generation; all its members call it together. The step begins again."""
        on_gradient = self.gradients.on_gradient
        self.part()
        self.membership = membership
        self.arena.wait_for_weights = lambda: None
        self.arena.move(self._memory())
        self._connect(self.buffers_of_step)
        self.gradients.on_gradient = on_gradient
        self.gather.enter(membership, self.exchange.thread)
        self.arena.wait_for_weights = self.gather.wait

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own forward."""
        return self.module(*inputs, **named)

    @property
    def slots(self) -> Slots:
        """This rank's share of the step's slots. Iterating over them seeds the random generators for each one."""
        return Slots(self.membership.slots, self._begin, self._forget_slot)

    def _forget_slot(self) -> None:
        """Reset the current slot, so that the first forward after a bare loop over `slots` begins the slot again."""
        self._slot = None

    def _begin_if_due(self) -> None:
        """Begin the next slot in forward, if the training loop does not iterate over `slots`."""
        slot = self.gradients.next_slot
        if self.trains and slot is not None and slot != self._slot:
            self._begin(slot)

    @property
    def trains(self) -> bool:
        """Whether a forward is one of training: another one may be an evaluation, whose result counts."""
        return self.module.training and torch.is_grad_enabled()

    def _begin(self, slot: int) -> None:
        """Begin a slot: what it computes depends on seed, step and slot only."""
        if not self.gradients.losses:
            if isinstance(self.membership.group, ChangingGroup) and self.membership.group.joins:
                raise ValueError("a worker that joins a run needs the loop `for step in model.steps(start, end)`")
            self.before_step()
            self.arena.check_module()
            self.phases.begin(self.progress.step + 1)
            self.buffers_of_step.begin_step()
        self._slot = slot
        self.seed_slot(slot)

    def seed_slot(self, slot: int) -> None:
        """Set the random generators for a slot of the current step."""
        seed_generators(self.seed, self.progress.step + 1, slot)

    def begin_again(self, slot: int) -> None:
        """Begin a slot of the step that was just reduced once more, to inspect it; the next step does not begin."""
        self.buffers_of_step.restore()
        self._slot = self.gradients.next_slot
        self.seed_slot(slot)

    def end_step(self, loss: float, tokens: int, updated: bool) -> None:
        """Count the step as committed, with an update or without."""
        if updated:
            self.buffers_of_step.commit()
        self.progress.committed(loss, tokens, updated)
        self._slot = None

    def steps(self, start: int, end: int) -> Iterator[int]:
        """The steps of a training loop, as `range(start, end)` counts them, through the loss and arrival of workers.

        A step that was not committed because a worker was lost is given again, and a worker that joins begins where the
        others are. `optimizer.step` must be called once in every step."""
        if self.optimizer is None:
            raise ValueError("the model has no optimizer yet: make one first, such as andon.AdamW(model)")
        return steps(self.optimizer, start, end)

    @property
    def group(self) -> Group:
        """The group, free for another collective: waits until the weights are gathered."""
        self.arena.wait_for_weights()
        return self.membership.group

    def backward(self, loss: Tensor, count: int, reduction: Literal["mean", "sum"] = "mean") -> None:
        """Backward of the next slot's loss, which is the mean over its `count` tokens (or samples), or their sum.

        A step's gradient is the mean over all tokens of all its slots, on every rank."""
        if not (self.optimizer and self.optimizer.failure):  # with a failure the step is repeated
            if self._slot is not None and self._slot == self.gradients.next_slot:
                self.buffers_of_step.note(self._slot)
            count = int(count)
            if count < 0:
                raise ValueError(f"count is {count}: it is the number of tokens (or samples) of the slot")
            self.gradients.backward(loss * count if reduction == "mean" else loss, count)
        self.buffers_of_step.restore()

    def close(self) -> None:
        """Wait until the weights are gathered, and disconnect; the caller closes the group."""
        try:
            self.arena.wait_for_weights()
        finally:
            self.part()

    def part(self) -> None:
        """Leave the generation, whose group may have failed: stop the thread and detach from the module."""
        self.exchange.close()
        self.gradients.close()
        group = self.membership.group
        group.exchanging = False
        if self.close in group.before_close:
            group.before_close.remove(self.close)


def _compare_what_is_not_trained(module: nn.Module, group: Group) -> str:
    """Halt if a frozen parameter or a buffer differs between ranks, since no update would make it equal; gives the
    digest of the frozen parameters."""
    frozen: dict[str, Tensor] = {name: each for name, each in module.named_parameters() if not each.requires_grad}
    tensors = frozen | dict(module.named_buffers())
    prints = [blake3(repr([(name, value.shape, value.dtype) for name, value in tensors.items()]).encode()).digest()]
    prints += [blake3(as_bytes(value)).digest() for value in tensors.values()]
    everyone = group.all_gather_bytes(b"".join(each[:WIDTH] for each in prints))
    for name, blame in differences(["the names of frozen parameters", *tensors], everyone):
        raise JidokaHalt(1, f"{name} is not trained, and differs{blame}", sound=False)
    named = b"".join(name.encode() + digest for name, digest in zip(frozen, prints[1:], strict=False))
    return blake3(named).hexdigest() if frozen else ""
