"""What goes round in a ring: the pieces of an operation in order, and the form in which they travel.

Each chunk is cut into *stretches* of a few pieces, and a *stripe* is one stretch of every chunk. The ring
finishes one stripe after the other: a stripe is small enough to stay in the cache until it has been all the
way round, and a stretch long enough to keep the neighbours busy meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from andon.group import serial

Span = tuple[int, int]
"""From this element to that one."""

PIECE: Final = 1 << 18
"""Elements (of f32) that are moved and added at once."""
STRETCH: Final = 2
"""Pieces in a stretch."""
SLOTS: Final = 2 * STRETCH + 2
"""Pieces that can wait to be passed on. More than a stretch waits only at a rank whose left neighbour is
ahead of it, and in a ring not everyone can be behind; so the ring never stands still with all slots full."""


def check_bounds(bounds: Sequence[int], count: int, world_size: int) -> None:
    """Refuse bounds that do not cut `count` elements into a part per rank."""
    whole = len(bounds) == world_size + 1 and bounds[0] == 0 and bounds[-1] == count
    if not whole or any(lo > hi for lo, hi in pairwise(bounds)):
        raise ValueError(f"{list(bounds)} does not cut {count} elements into {world_size} parts")


class Route:
    """The pieces that leave and arrive when `chunks[0]` is sent and each of the others is received and, but
    for the last, passed on."""

    def __init__(self, bounds: Sequence[int], chunks: Sequence[int], step: int) -> None:
        self.leaving: list[Span] = []
        self.sources: list[int] = []  # which arrived piece each leaving one is; -1: my own
        self.arriving: list[Span] = []
        self.turns: list[int] = []  # in which round each piece arrives
        self._leaves_as: list[int] = []  # which leaving piece each arrived one becomes; -1: it stays
        self._ready = self._room = 0
        longest = max(hi - lo for lo, hi in pairwise(bounds))
        for start in range(0, longest, STRETCH * step):
            for turn, chunk in enumerate(chunks):
                lo, hi = bounds[chunk] + start, min(bounds[chunk] + start + STRETCH * step, bounds[chunk + 1])
                spans = [(at, min(at + step, hi)) for at in range(lo, hi, step)]
                self._add(turn, turn == len(chunks) - 1, spans)

    def _add(self, turn: int, last: bool, spans: list[Span]) -> None:
        if not last:
            arrived = range(len(self.arriving), len(self.arriving) + len(spans))
            self.sources += arrived if turn else [-1] * len(spans)
        if turn:
            leaving = range(len(self.leaving), len(self.leaving) + len(spans))
            self._leaves_as += [-1] * len(spans) if last else leaving
            self.arriving += spans
            self.turns += [turn - 1] * len(spans)
        if not last:
            self.leaving += spans

    def ready(self, arrived: int) -> int:
        """How many pieces may leave once so many have arrived."""
        while self._ready < len(self.leaving) and self.sources[self._ready] < arrived:
            self._ready += 1
        return self._ready

    def room(self, left: int) -> int:
        """How many pieces may arrive once so many have left, if each waits in a slot for that."""
        while self._room < len(self.arriving) and (
            self._room < SLOTS or self._leaves_as[self._room - SLOTS] < left
        ):
            self._room += 1
        return self._room


class Scratch:
    """The buffers that the forms need: slots for bf16, which serve as one large buffer for f32."""

    def __init__(self) -> None:
        self.memory = torch.empty((SLOTS + 2) * 2 * PIECE, dtype=torch.uint8)
        self.array = self.memory.numpy()
        self.bytes = self.array.data
        self.slots: list[torch.Tensor] = list(self.memory.view(torch.bfloat16).view(SLOTS + 2, PIECE))
        self.slot_bytes: list[memoryview] = [slot.view(torch.uint8).numpy().data for slot in self.slots]


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
            np.add(mine, self._scratch.array[: mine.nbytes].view(np.float32), out=mine)

    def alone(self) -> None:
        """Nothing travels: a ring of one."""


class Rounded:
    """Values travel as bf16. A piece stays in its slot from arrival until it is passed on, so that nothing
    is converted twice. To add two bf16 numbers is to add them in f32 and round."""

    kind = "bf16"
    item_size = 2
    slotted = True

    def __init__(self, flat: torch.Tensor, scratch: Scratch) -> None:
        self.count, self.step = flat.numel(), PIECE
        self._flat = flat
        self._slots, self._bytes = scratch.slots, scratch.slot_bytes

    def outgoing(self, span: Span, source: int) -> memoryview:
        """The bytes of a piece that leaves; `source` is which arrived piece it was (-1: my own)."""
        size = span[1] - span[0]
        if source >= 0:
            return self._bytes[source % SLOTS][: 2 * size]
        serial.copy(self._slot(SLOTS, size), self._flat[span[0] : span[1]])
        return self._bytes[SLOTS][: 2 * size]

    def incoming(self, span: Span, index: int, add: bool) -> memoryview:
        """Where the piece with this index can arrive."""
        return self._bytes[index % SLOTS][: 2 * (span[1] - span[0])]

    def arrived(self, span: Span, index: int, add: bool, final: bool) -> None:
        """The piece is there: add my values to it, or keep it; `final`: the sum is complete."""
        size = span[1] - span[0]
        piece, mine = self._slot(index % SLOTS, size), self._flat[span[0] : span[1]]
        if add:
            rounded = self._slot(SLOTS + 1, size)
            serial.copy(rounded, mine)
            serial.add(piece, rounded)
        if final or not add:
            serial.copy(mine, piece)

    def alone(self) -> None:
        """Nothing travels: a ring of one, whose sum is rounded all the same."""
        self._flat.copy_(self._flat.bfloat16())

    def _slot(self, index: int, size: int) -> torch.Tensor:
        slot = self._slots[index]
        return slot if size == PIECE else slot[:size]
