"""How values travel over a network: with their own bits, or rounded to bf16; and the arithmetic on arrival.

All arithmetic runs on one thread. A transport works in the background of a computation that has the cores; a torch
operation on many elements would wake torch's other threads and wait for all of them, which on busy cores takes longer
than the work itself. numpy has no threads, and torch stays on one below GRAIN elements.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from andon.transport.rows import Wire, first_row
from andon.transport.tcp.frames import Floats

Span = tuple[int, int]
"""From this element up to that one."""

PIECE_ELEMENTS: Final = 1 << 18
"""Elements of f32 that are moved and added at once; in a ring twice as many of bf16."""
TILE_PIECES: Final = 2
"""Pieces of each chunk in a tile of a ring (see `andon.transport.tcp.ring_schedule`)."""
BUFFERS: Final = 2 * TILE_PIECES + 2
"""Pieces that can wait to be passed on. More than a tile's waits only at a rank whose left neighbour is ahead of it,
and in a ring not everyone can be behind, so the ring never stops with all buffers full."""
GRAIN: Final = 32_000
"""Elements below which torch does not start its other threads."""


def add(into: Floats, other: Floats) -> None:
    """Add in place. An overflow is found when the sums are checked; numpy need not warn of it."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(into, other, out=into)


def add_up(adds: Sequence[tuple[int, int]], leaves: Sequence[Floats]) -> None:
    """`Order.add_up` on arrays."""
    for into, other in adds:
        add(leaves[into], leaves[other])


def convert(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values into another type; f32 becomes bf16 by rounding to nearest, ties to even."""
    for into, values in _grains(target, source):
        into.copy_(values)


def add_bf16(target: torch.Tensor, source: torch.Tensor) -> None:
    """Add bf16 to bf16 in place: torch adds in f32 and rounds the sum."""
    for into, values in _grains(target, source):
        into.add_(values)


def _grains(*tensors: torch.Tensor) -> Iterable[tuple[torch.Tensor, ...]]:
    if torch.get_num_threads() == 1:
        return [tensors]
    return zip(*(torch.split(tensor, GRAIN) for tensor in tensors), strict=True)


@contextmanager
def on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor itself; for one on a GPU a pinned copy, whose first row is copied back at the end."""
    if tensor.device.type == "cpu":
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError("the elements of a row must be contiguous to be exchanged")
        yield tensor
        return
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    yield host
    first_row(tensor).copy_(first_row(host))


class Scratch:
    """Memory for arriving pieces: one large buffer for f32; for bf16, BUFFERS pieces that wait to be passed on and two
    more, for a piece of this rank's own that leaves and for one that is added."""

    def __init__(self) -> None:
        # From numpy, which asks for huge pages: receiving into small ones takes a tenth longer.
        self.array = np.empty((BUFFERS + 2) * 4 * PIECE_ELEMENTS, np.uint8)
        self.bytes = self.array.data
        memory = torch.from_numpy(self.array)
        self.pieces: list[torch.Tensor] = list(memory.view(torch.bfloat16).view(BUFFERS + 2, 2 * PIECE_ELEMENTS))
        self.piece_bytes: list[memoryview] = [one.view(torch.uint8).numpy().data for one in self.pieces]


class F32:
    """Values travel with their own bits, whatever their type: they are sent from where they lie, and received there
    when nothing is to be added. Only f32 is added."""

    waits_in_buffer = False

    def __init__(self, flat: torch.Tensor, scratch: Scratch) -> None:
        self.kind = str(flat.dtype).removeprefix("torch.")
        self.count, self.item_size = flat.numel(), flat.element_size()
        self.step = 4 * PIECE_ELEMENTS // self.item_size
        self._array = flat.view(torch.uint8).numpy()
        self._bytes = self._array.data
        self._scratch = scratch

    def outgoing(self, span: Span, source: int) -> memoryview:
        """The bytes of a piece to send; `source` is the index with which it arrived (-1: this rank's own)."""
        return self._bytes[span[0] * self.item_size : span[1] * self.item_size]

    def incoming(self, span: Span, index: int, adds: bool) -> memoryview:
        """Where the piece with this index is to be received."""
        return self._scratch.bytes[: 4 * (span[1] - span[0])] if adds else self.outgoing(span, index)

    def arrived(self, span: Span, index: int, adds: bool, final: bool) -> None:
        """Add a received piece to this rank's values, or keep it; `final`: the sum is complete."""
        if adds:
            mine = self._array[4 * span[0] : 4 * span[1]].view(np.float32)
            add(mine, self._scratch.array[: mine.nbytes].view(np.float32))

    def round(self) -> None:
        """The sum of a ring of one rank: nothing to round."""


class Bf16:
    """Values travel as bf16. A piece stays in its buffer from arrival until it is passed on, so that nothing is
    converted twice."""

    kind = "bf16"
    item_size = 2
    waits_in_buffer = True

    def __init__(self, flat: torch.Tensor, scratch: Scratch) -> None:
        self.count, self.step = flat.numel(), 2 * PIECE_ELEMENTS
        self._values = flat
        self._pieces, self._bytes = scratch.pieces, scratch.piece_bytes

    def outgoing(self, span: Span, source: int) -> memoryview:
        """The bytes of a piece to send; `source` is the index with which it arrived (-1: this rank's own)."""
        size = span[1] - span[0]
        if source >= 0:
            return self._bytes[source % BUFFERS][: 2 * size]
        convert(self._piece(BUFFERS, size), self._values[span[0] : span[1]])
        return self._bytes[BUFFERS][: 2 * size]

    def incoming(self, span: Span, index: int, adds: bool) -> memoryview:
        """Where the piece with this index is to be received."""
        return self._bytes[index % BUFFERS][: 2 * (span[1] - span[0])]

    def arrived(self, span: Span, index: int, adds: bool, final: bool) -> None:
        """Add this rank's rounded values to a received piece, or keep it; `final`: the sum is complete."""
        size = span[1] - span[0]
        piece, mine = self._piece(index % BUFFERS, size), self._values[span[0] : span[1]]
        if adds:
            rounded = self._piece(BUFFERS + 1, size)
            convert(rounded, mine)
            add_bf16(piece, rounded)
        if final or not adds:
            convert(mine, piece)

    def round(self) -> None:
        """The sum of a ring of one rank is rounded like any other."""
        self._values.copy_(self._values.bfloat16())

    def _piece(self, index: int, size: int) -> torch.Tensor:
        piece = self._pieces[index]
        return piece if size == len(piece) else piece[:size]


Encoding = F32 | Bf16
ENCODINGS: Final[dict[Wire, type[Encoding]]] = {"f32": F32, "bf16": Bf16}
