"""The pipeline of a star's server: how the pieces of an operation pass through it.

An operation is cut into *pieces*, each a range of elements with an owner. A piece has *sources*, the ranks that send
their values of it, and *targets*, the ranks that receive the result:

    operation        sources    the result is              targets
    all-reduce       everyone   the sum in the one order   everyone
    reduce-scatter   everyone   the sum in the one order   the owner
    all-gather       the owner  the owner's values         everyone else

The server has one buffer per *leaf* of a piece (a row of a rank, see `andon.engine.gradients.order`) and keeps a
*window* of pieces open: a piece is received, added up when its last leaf has arrived, and sent; when all its targets
have it, its buffers serve the next piece. So the server holds a few pieces, whatever the length of the vector. A rank
that is ahead is not read from until a buffer is free, and waits in its own send.
"""

import socket
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from andon.engine.gradients.order import Order
from andon.transport.tcp.encoding import PIECE_ELEMENTS, add_bf16, add_up
from andon.transport.tcp.stream import Incoming, Outgoing, Stream

WINDOW: Final = 2
ITEM_BYTES: Final = {"float32": 4, "bf16": 2, "uint8": 1}


@dataclass(frozen=True)
class Piece:
    """Elements [lo, hi), and the rank that owns them."""

    lo: int
    hi: int
    owner: int


def cut(operation: str, bounds: Sequence[int], kind: str) -> list[Piece]:
    """The pieces of an operation, in order: the owners take turns, so that all links are busy."""
    step = 4 * PIECE_ELEMENTS if kind == "uint8" else PIECE_ELEMENTS
    if operation == "all-reduce":
        bounds = (0, bounds[-1])
    pieces = [
        Piece(at, min(at + step, hi), owner)
        for owner, (lo, hi) in enumerate(pairwise(bounds))
        for at in range(lo, hi, step)
    ]
    return sorted(pieces, key=lambda piece: piece.lo - bounds[piece.owner])


def is_source(operation: str, piece: Piece, rank: int) -> bool:
    """Whether a rank sends its values of a piece."""
    return operation != "all-gather" or rank == piece.owner


def is_target(operation: str, piece: Piece, rank: int) -> bool:
    """Whether a rank receives the result of a piece."""
    return operation == "all-reduce" or (rank == piece.owner) == (operation == "reduce-scatter")


class PipelineBuffers:
    """One buffer per leaf for each piece of the window."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self._buffers = torch.empty(WINDOW, leaves, 4 * PIECE_ELEMENTS, dtype=torch.uint8)
        self._floats = self._buffers.view(torch.float32).numpy()
        self.bytes: list[list[memoryview]] = [[leaf.numpy().data for leaf in one] for one in self._buffers]

    def add_up(self, window: int, size: int, adds: Sequence[tuple[int, int]], kind: str) -> None:
        """Add the leaves of a piece in the one order; the sum ends in the first leaf."""
        if kind == "float32":
            add_up(adds, list(self._floats[window, :, :size]))
        else:
            leaves = self._buffers[window].view(torch.bfloat16)[:, :size]
            for into, other in adds:
                add_bf16(leaves[into], leaves[other])


class Pipeline:
    """The pieces of one operation on their way through the server."""

    def __init__(
        self, operation: str, bounds: Sequence[int], kind: str, order: Order | None, buffers: PipelineBuffers
    ) -> None:
        self._operation, self._kind, self._buffers = operation, kind, buffers
        self._pieces = cut(operation, bounds, kind)
        self._leaves, self._adds = (order.leaves, order.adds) if order else ([], ())
        self._missing = [0] * len(self._pieces)  # leaves of each piece that have not arrived
        self._unsent = [0] * len(self._pieces)  # targets of each piece that do not have it
        self._finished = 0
        self._arriving: list[tuple[Incoming, list[int]]] = []
        self._leaving: list[tuple[Outgoing, list[int]]] = []

    def streams(self, sockets: Sequence[socket.socket]) -> list[Stream]:
        """The streams that move the pieces."""
        for rank, sock in enumerate(sockets):
            self._receive_from(rank, sock)
            self._send_to(rank, sock)
        self._open_window()
        return [stream for stream, _ in self._arriving + self._leaving]

    def _receive_from(self, rank: int, sock: socket.socket) -> None:
        leaves = [leaf for leaf, (source, _) in enumerate(self._leaves) if source == rank]
        if not self._leaves:  # a gather: the owner's values are the only leaf
            leaves = [0]
        sent = [index for index, piece in enumerate(self._pieces) if is_source(self._operation, piece, rank)]
        items = [(index, leaf) for index in sent for leaf in leaves]
        for index, _ in items:
            self._missing[index] += 1

        def arrived(item: int) -> None:
            index, _ = items[item]
            self._missing[index] -= 1
            if not self._missing[index]:
                self._complete(index)

        stream = Incoming(sock, rank, len(items), lambda item: self._bytes(*items[item]), arrived)
        self._arriving.append((stream, [index for index, _ in items]))

    def _send_to(self, rank: int, sock: socket.socket) -> None:
        items = [index for index, piece in enumerate(self._pieces) if is_target(self._operation, piece, rank)]
        for index in items:
            self._unsent[index] += 1

        def sent(item: int) -> None:
            self._unsent[items[item]] -= 1
            self._open_window()

        stream = Outgoing(sock, rank, len(items), lambda item: self._bytes(items[item], 0), sent)
        stream.ready = 0
        self._leaving.append((stream, items))

    def _complete(self, index: int) -> None:
        """Every leaf of a piece has arrived: add them up and release the result."""
        size = self._pieces[index].hi - self._pieces[index].lo
        self._buffers.add_up(index % WINDOW, size, self._adds, self._kind)
        for stream, items in self._leaving:
            while stream.ready < len(items) and self._missing[items[stream.ready]] == 0:
                stream.ready += 1
        self._open_window()

    def _open_window(self) -> None:
        """Let the ranks send the pieces for which there are buffers."""
        while self._finished < len(self._pieces) and not self._missing[self._finished] + self._unsent[self._finished]:
            self._finished += 1
        for stream, items in self._arriving:
            stream.ready = bisect_left(items, self._finished + WINDOW)

    def _bytes(self, index: int, leaf: int) -> memoryview:
        size = self._pieces[index].hi - self._pieces[index].lo
        return self._buffers.bytes[index % WINDOW][leaf][: size * ITEM_BYTES[self._kind]]
