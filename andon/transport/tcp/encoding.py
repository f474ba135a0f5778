"""How values are sent over a network, unchanged or rounded to bf16, and how they are added on arrival.

All arithmetic runs on one thread, because a transport works in the background of a computation. A torch operation on
many elements wakes torch's other threads and waits for them; on cores that are busy with the computation, that takes
longer than the work. numpy has no threads, and torch uses one below GRAIN_ELEMENTS.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from andon.engine.gradients.order import Order
from andon.transport.rows import Wire, first_row, rows_of
from andon.transport.tcp.frames import Floats

Span = tuple[int, int]
"""The first element, and the one after the last."""

PIECE_ELEMENTS: Final = 1 << 18
"""Elements of f32 that are moved and added at once; in a ring, twice as many of bf16."""
TILE_PIECES: Final = 2
"""Pieces of each chunk in a tile of a ring (see `andon.transport.tcp.ring_schedule`)."""
BUFFERS: Final = 2 * TILE_PIECES + 2
"""Pieces that can wait to be passed on. More pieces than a tile's wait only at a rank whose left neighbour is ahead of
it. In a ring not every rank can be behind, so the ring never stops with all buffers full."""
GRAIN_ELEMENTS: Final = 32_000
"""Below this number torch does not start its other threads."""


def add(into: Floats, other: Floats) -> None:
    """Add in place, without numpy's warning of an overflow: the check of the sums finds it."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(into, other, out=into)


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
    return zip(*(torch.split(tensor, GRAIN_ELEMENTS) for tensor in tensors), strict=True)


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


@contextmanager
def contribution(nodes: torch.Tensor, order: Order, rank: int) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """On the host: the row that receives the sum, and the rows that a rank contributes to it."""
    if nodes.dtype != torch.float32:
        raise ValueError(f"only float32 can be summed, not {nodes.dtype}")
    with on_host(nodes) as host:
        yield first_row(host), rows_of(host, order, rank)


class Scratch:
    """Memory for arriving pieces. F32 uses it as one buffer. Bf16 uses BUFFERS pieces that wait to be passed on and two
    more: one for a piece of this rank's values to send, one for those to add."""

    def __init__(self) -> None:
        # From numpy, which asks for huge pages: receiving into small ones takes a tenth longer.
        self.array = np.empty((BUFFERS + 2) * 4 * PIECE_ELEMENTS, np.uint8)
        self.bytes = self.array.data
        memory = torch.from_numpy(self.array)
        self.pieces: list[torch.Tensor] = list(memory.view(torch.bfloat16).view(BUFFERS + 2, 2 * PIECE_ELEMENTS))
        self.piece_bytes: list[memoryview] = [one.view(torch.uint8).numpy().data for one in self.pieces]


class F32:
    """Values of any type, unchanged: sent from the tensor itself, and received into it if nothing is added. Only f32
    can be added."""

    waits_in_buffer = False

    def __init__(self, flat: torch.Tensor, scratch: Scratch) -> None:
        self.kind = str(flat.dtype).removeprefix("torch.")
        self.count, self.item_size = flat.numel(), flat.element_size()
        self.piece_size = 4 * PIECE_ELEMENTS // self.item_size
        self._array = flat.view(torch.uint8).numpy()
        self._bytes = self._array.data
        self._scratch = scratch

    def outgoing(self, span: Span, source: int) -> memoryview:
        """The bytes of a piece to send; `source` is the index with which it arrived (-1: it is this rank's)."""
        return self._bytes[span[0] * self.item_size : span[1] * self.item_size]

    def incoming(self, span: Span, index: int, adds: bool) -> memoryview:
        """The buffer that receives the piece with this index."""
        return self._scratch.bytes[: 4 * (span[1] - span[0])] if adds else self.outgoing(span, index)

    def arrived(self, span: Span, index: int, adds: bool, final: bool) -> None:
        """Add a received piece to this rank's values, or keep it; `final`: the sum is complete."""
        if adds:
            mine = self._array[4 * span[0] : 4 * span[1]].view(np.float32)
            add(mine, self._scratch.array[: mine.nbytes].view(np.float32))

    def round(self) -> None:
        """Round the sum of a ring of one rank: nothing to do."""


class Bf16:
    """Values rounded to bf16. A piece stays in its buffer from arrival until it is passed on, so that nothing is
    converted twice."""

    kind = "bf16"
    item_size = 2
    waits_in_buffer = True

    def __init__(self, flat: torch.Tensor, scratch: Scratch) -> None:
        self.count, self.piece_size = flat.numel(), 2 * PIECE_ELEMENTS
        self._values = flat
        self._pieces, self._bytes = scratch.pieces, scratch.piece_bytes

    def outgoing(self, span: Span, source: int) -> memoryview:
        """The bytes of a piece to send; `source` is the index with which it arrived (-1: it is this rank's)."""
        size = span[1] - span[0]
        if source >= 0:
            return self._bytes[source % BUFFERS][: 2 * size]
        convert(self._piece(BUFFERS, size), self._values[span[0] : span[1]])
        return self._bytes[BUFFERS][: 2 * size]

    def incoming(self, span: Span, index: int, adds: bool) -> memoryview:
        """The buffer that receives the piece with this index."""
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
        """Round the sum of a ring of one rank, as any other sum is."""
        self._values.copy_(self._values.bfloat16())

    def _piece(self, index: int, size: int) -> torch.Tensor:
        piece = self._pieces[index]
        return piece if size == len(piece) else piece[:size]


Encoding = F32 | Bf16
ENCODINGS: Final[dict[Wire, type[Encoding]]] = {"f32": F32, "bf16": Bf16}
