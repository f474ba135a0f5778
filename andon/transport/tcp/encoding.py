"""The forms in which values travel over a network: as they are, or rounded to bf16."""

from __future__ import annotations

from types import ModuleType
from typing import Final

import numpy as np
import torch

from andon.transport.base import Wire
from andon.transport.tcp import arithmetic as serial

Span = tuple[int, int]
"""From this element to that one."""

PIECE: Final = 1 << 18
"""Elements of f32 that are moved and added at once; in a ring twice as many of bf16."""
STRETCH: Final = 2
"""Pieces in a stretch of a ring (see `andon.transport.tcp.ring_schedule`)."""
SLOTS: Final = 2 * STRETCH + 2
"""Pieces that can wait to be passed on. More than a stretch waits only at a rank whose left neighbour is
ahead of it, and in a ring not everyone can be behind; so the ring never stands still with all slots full."""


def arithmetic() -> ModuleType:
    """The arithmetic of bf16: imported when it is needed, for it is compiled then."""
    from andon.transport.tcp import rounding

    return rounding


class Scratch:
    """The buffers that the forms need: slots for bf16, which serve as one large buffer for f32."""

    def __init__(self) -> None:
        self.array = np.empty((SLOTS + 1) * 4 * PIECE, np.uint8)
        self.bytes = self.array.data
        self.slots = list(self.array.view(np.uint16).reshape(SLOTS + 1, 2 * PIECE))
        self.slot_bytes: list[memoryview] = [slot.view(np.uint8).data for slot in self.slots]


class Exact:
    """Values travel as they are: sent from where they lie, and received there when nothing is to be added."""

    slotted = False

    def __init__(self, flat: torch.Tensor, scratch: Scratch) -> None:
        self.kind = str(flat.dtype).removeprefix("torch.")
        self.count, self.item_size = flat.numel(), flat.element_size()
        self.step = 4 * PIECE // self.item_size
        self._array = flat.view(torch.uint8).numpy()
        self._bytes = self._array.data
        self._scratch = scratch

    def outgoing(self, span: Span, source: int) -> memoryview:
        """The bytes of a piece that leaves; `source` is which arrived piece it was (-1: my own)."""
        return self._bytes[span[0] * self.item_size : span[1] * self.item_size]

    def incoming(self, span: Span, index: int, add: bool) -> memoryview:
        """Where the piece with this index can arrive."""
        return self._scratch.bytes[: 4 * (span[1] - span[0])] if add else self.outgoing(span, index)

    def arrived(self, span: Span, index: int, add: bool, final: bool) -> None:
        """The piece is there: add it to my values, or keep it; `final`: the sum is complete."""
        if add:
            mine = self._array[4 * span[0] : 4 * span[1]].view(np.float32)
            serial.add(mine, self._scratch.array[: mine.nbytes].view(np.float32))

    def alone(self) -> None:
        """Nothing travels: a ring of one."""


class Rounded:
    """Values travel as bf16. A piece stays in its slot from arrival until it is passed on, so that nothing
    is converted twice."""

    kind = "bf16"
    item_size = 2
    slotted = True

    def __init__(self, flat: torch.Tensor, scratch: Scratch) -> None:
        self.count, self.step = flat.numel(), 2 * PIECE
        self._values, self._arithmetic = flat.numpy(), arithmetic()
        self._slots, self._bytes = scratch.slots, scratch.slot_bytes

    def outgoing(self, span: Span, source: int) -> memoryview:
        """The bytes of a piece that leaves; `source` is which arrived piece it was (-1: my own)."""
        size = span[1] - span[0]
        if source >= 0:
            return self._bytes[source % SLOTS][: 2 * size]
        self._arithmetic.round_off(self._values[span[0] : span[1]], self._slots[SLOTS][:size])
        return self._bytes[SLOTS][: 2 * size]

    def incoming(self, span: Span, index: int, add: bool) -> memoryview:
        """Where the piece with this index can arrive."""
        return self._bytes[index % SLOTS][: 2 * (span[1] - span[0])]

    def arrived(self, span: Span, index: int, add: bool, final: bool) -> None:
        """The piece is there: add my values to it, or keep it; `final`: the sum is complete."""
        piece, mine = self._slots[index % SLOTS][: span[1] - span[0]], self._values[span[0] : span[1]]
        if final:
            self._arithmetic.add_to_both(piece, mine)
        elif add:
            self._arithmetic.add(piece, mine)
        else:
            self._arithmetic.widen(piece, mine)

    def alone(self) -> None:
        """Nothing travels: a ring of one, whose sum is rounded all the same."""
        self._arithmetic.round_in_place(self._values)


Form = Exact | Rounded


def form_for(wire: Wire) -> type[Exact] | type[Rounded]:
    """How gradients travel; compiled now rather than while others wait for the first of them."""
    if wire == "f32":
        return Exact
    arithmetic()
    return Rounded
