"""The slots of a step: each begins with the same random generators and buffers, whichever worker computes it.

Before a slot the generators of Python, numpy and torch are seeded from (seed, step, slot), so that dropout does not
depend on the number of workers. Buffers that forward changes (BatchNorm's) have the same values at the start of every
slot of a step; the step ends with their mean over all slots, added in the one order. Ranks compare them like weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from andon.engine.gradients.order import make_order
from andon.engine.membership import Membership
from andon.engine.reading import Reading
from andon.integrity.fingerprint import as_bytes


def seed_generators(seed: int, step: int, slot: int) -> None:
    """Set the generators of Python, numpy and torch for one slot."""
    number = int.from_bytes(blake3(f"{seed} {step} {slot}".encode()).digest(8), "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    # Not `torch.manual_seed`: it formats a traceback for every kind of device that is not in use.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(number)


class Slots:
    """A rank's slots of one step; iterating over them begins one after the other."""

    def __init__(self, numbers: range, begin: Callable[[int], None], end: Callable[[], None]) -> None:
        self._numbers, self._begin, self._end = numbers, begin, end

    def __iter__(self) -> Iterator[int]:
        for slot in self._numbers:
            self._begin(slot)
            yield slot
        self._end()

    def __len__(self) -> int:
        return len(self._numbers)


class Buffers:
    """The buffers of a module during a step; a passenger: the ranks report which of them forward has changed.

    A buffer that forward creates or reshapes cannot be averaged. If it is registered with `persistent=False`, it is a
    *cache*, and left alone on all ranks from then on; otherwise it is refused."""

    def __init__(self, module: nn.Module, membership: Membership, before: Buffers | None) -> None:
        """`before`: the buffers in the generation before."""
        self.membership, self._is_first = membership, before is None
        self.caches: list[str] = before.caches if before else []
        """The buffers that forward has created or reshaped on any rank."""
        self.changing: list[str] = []
        """The buffers that forward has ever changed on any rank, sorted by name."""
        self._before: dict[str, Tensor] = {}
        self._after: dict[int, dict[str, Tensor]] = {}
        self._changed: set[str] = set()
        self._changed_on_gpu: list[tuple[list[str], Reading]] = []
        """For each slot: the names of the buffers on a GPU, and whether each has changed."""
        self._gathered = torch.empty(0, dtype=torch.uint8)
        """The values that the slots of all ranks have left in the buffers that change."""
        self._all_compared = False
        self._modules = list(module.named_modules())  # finding them takes as long as a small step's exchange
        for _, buffer, _ in self._registered():
            if any(size > 1 and not step for size, step in zip(buffer.shape, buffer.stride(), strict=True)):
                buffer.data = buffer.clone()  # an expanded tensor cannot be written to

    def begin_step(self) -> None:
        """Keep the values with which every slot of the step begins."""
        self._before = {name: buffer.clone() for name, buffer, _ in self._registered()}
        self._after, self._changed, self._changed_on_gpu = {}, set(), []

    def note(self, slot: int) -> None:
        """Note what forward of a slot has changed."""
        after = self._after[slot] = {}
        flags: dict[str, Tensor] = {}
        for name, buffer, saved in self._registered():
            before = self._before.get(name)
            if before is not None and _same_kind(before, buffer):
                if buffer.is_cuda:  # waiting for the comparison here would leave the GPU without work
                    after[name], flags[name] = buffer.clone(), (before != buffer).any()
                elif not torch.equal(before, buffer):
                    after[name] = buffer.clone()
                    self._changed.add(name)
            elif not saved:
                self.caches = sorted({*self.caches, name})
            else:
                what = "creates the buffer" if before is None else "changes the shape or dtype of the buffer"
                remedy = "create it like that in __init__, or register it with persistent=False if it is a cache"
                raise ValueError(f"forward {what} {name}, which a checkpoint could not load: {remedy}")
        if flags:
            self._changed_on_gpu.append((list(flags), Reading(torch.stack(list(flags.values())))))

    @torch.no_grad()
    def restore(self) -> None:
        """Give every buffer the value with which slots begin; after backward, which may need what forward left."""
        for name, buffer, _ in self._registered():
            before = self._before.get(name)
            if before is None or not _same_kind(before, buffer):
                continue
            if buffer.is_cuda or not torch.equal(before, buffer):
                buffer.copy_(before)

    def status(self) -> list[list[str]]:
        """The buffers that this rank's slots have changed, and the caches."""
        for names, reading in self._changed_on_gpu:
            self._changed |= {name for name, changed in zip(names, reading.values(), strict=True) if changed}
        return [sorted(self._changed), self.caches]

    def receive(self, statuses: Sequence[Sequence[Sequence[str]]]) -> None:
        """Take the buffers that the slots of all ranks have changed, and the caches of all ranks."""
        changed, caches = ({name for names in kind for name in names} for kind in zip(*statuses, strict=True))
        self.caches = sorted(caches)
        self.changing = sorted({*self.changing, *changed} - caches)
        self._all_compared = True

    def gather(self) -> None:
        """Gather the values that all slots left in changed buffers, before the verdict."""
        if not self.changing:
            return
        order, size = self.membership.order, sum(self._before[name].nbytes for name in self.changing)
        by_slot = torch.empty(order.slots, size, dtype=torch.uint8)
        for slot in self.membership.slots:
            after = self._after.get(slot, {})
            values = b"".join(as_bytes(after.get(name, self._before[name])) for name in self.changing)
            by_slot[slot] = torch.frombuffer(bytearray(values), dtype=torch.uint8)
        self._gathered = by_slot.view(-1)
        self.membership.group.all_gather(self._gathered, [size * bound for bound in order.bounds])

    @torch.no_grad()
    def commit(self) -> None:
        """Set every changed buffer to its mean over all slots: the step is committed."""
        if not self.changing:
            return
        found = {name: buffer for name, buffer, _ in self._registered()}
        pieces = self._cut(self._gathered)
        for name in self.changing:
            found[name].copy_(_mean(self._before[name], [slot[name] for slot in pieces]))

    def _cut(self, everyone: Tensor) -> list[dict[str, Tensor]]:
        """The values of every slot, from the bytes of all of them."""
        sizes = [self._before[name].nbytes for name in self.changing]
        by_slot = everyone.view(self.membership.order.slots, sum(sizes))
        return [
            {
                name: part.clone().view(self._before[name].dtype).view(self._before[name].shape)
                for name, part in zip(self.changing, row.split(sizes), strict=True)
            }
            for row in by_slot
        ]

    def fingerprint(self) -> Iterator[bytes]:
        """What ranks compare: the values before the step of the buffers that change; in the first step, of all, and in
        the first step of a later generation, of those that are saved."""
        names = self.changing if self._all_compared else sorted(self._comparable())
        return (bytes(as_bytes(self._before[name])) for name in names)

    def _comparable(self) -> list[str]:
        # Those that are not saved are sent to new members, but for caches, which differ.
        return [name for name, _, saved in self._registered() if name in self._before and (saved or self._is_first)]

    def _registered(self) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, buffer, whether it is persistent) of every buffer."""
        for path, module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    saved = name not in module._non_persistent_buffers_set
                    yield f"{path}.{name}" if path else name, buffer, saved


def _same_kind(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _mean(before: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The mean in the one order, for integers rounded down: a count that is equal in all slots stays the same. A flag
    changes if any slot changed it."""
    if before.dtype == torch.bool:
        before = before.to(values[0].device)
        return before ^ torch.stack([value ^ before for value in values]).any(0)
    whole = not (before.is_floating_point() or before.is_complex())
    wide = torch.complex128 if before.is_complex() else torch.float64
    terms = [value.to(torch.int64 if whole else wide, copy=True) for value in values]
    make_order(len(terms), len(terms)).add_up(terms)
    return terms[0] // len(terms) if whole else terms[0] / len(terms)
