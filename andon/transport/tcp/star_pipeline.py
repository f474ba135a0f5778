"""The pipeline of a star's server: how the pieces of an operation pass through it.

An operation is cut into *pieces*, each a range of elements with an owner. A piece has *sources*, the ranks that send
their values of it, and *targets*, the ranks that receive the result:

    operation        sources    the result is              targets
    all-reduce       all ranks  the sum in the one order   all ranks
    reduce-scatter   all ranks  the sum in the one order   the owner
    all-gather       the owner  the owner's values         all other ranks

The server has one buffer per *leaf* of a piece (a row of a rank, see `andon.engine.gradients.order`) and keeps a
*window* of pieces open. A piece is received, added up when its last leaf has arrived, and sent. When all targets have
it, its buffers are free for the next piece. So the server holds a few pieces, whatever the length of the vector. It
does not read from a rank that is ahead until a buffer is free; that rank waits in its send.
"""

import socket
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch

from andon.engine.gradients.order import Order
from andon.transport.tcp.encoding import PIECE_ELEMENTS, add, add_bf16
from andon.transport.tcp.stream import Incoming, Outgoing, Stream

WINDOW_PIECES: Final = 2
ITEM_BYTES: Final = {"float32": 4, "bf16": 2, "uint8": 1}


@dataclass(frozen=True)
class Piece:
    """Elements [lo, hi), and the rank that owns them."""

    lo: int
    hi: int
    owner: int


def cut(bounds: Sequence[int], kind: str) -> list[Piece]:
    """The pieces of an operation, in order: the owners take turns, so that all links are busy."""
    size = 4 * PIECE_ELEMENTS if kind == "uint8" else PIECE_ELEMENTS
    pieces = [
        Piece(at, min(at + size, hi), owner)
        for owner, (lo, hi) in enumerate(pairwise(bounds))
        for at in range(lo, hi, size)
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
        buffers = torch.empty(WINDOW_PIECES, leaves, 4 * PIECE_ELEMENTS, dtype=torch.uint8)
        self._floats, self._rounded = buffers.view(torch.float32).numpy(), buffers.view(torch.bfloat16)
        self.bytes: list[list[memoryview]] = [[leaf.numpy().data for leaf in piece] for piece in buffers]

    def add_up(self, window: int, size: int, adds: Sequence[tuple[int, int]], kind: str) -> None:
        """Add the leaves of a piece in the one order; the sum ends in the first leaf."""
        if kind == "float32":
            floats = self._floats[window, :, :size]
            for into, other in adds:
                add(floats[into], floats[other])
        else:
            rounded = self._rounded[window, :, :size]
            for into, other in adds:
                add_bf16(rounded[into], rounded[other])


class Pipeline:
    """Moves the pieces of one operation through the server."""

    def __init__(
        self, operation: str, bounds: Sequence[int], kind: str, order: Order | None, buffers: PipelineBuffers
    ) -> None:
        self._operation, self._kind, self._buffers = operation, kind, buffers
        self._pieces = cut(bounds, kind)
        self._leaves, self._adds = (order.leaves, order.adds) if order else ([], ())
        self._missing = [0] * len(self._pieces)  # leaves of each piece that have not arrived
        self._unsent = [0] * len(self._pieces)  # targets of each piece that have not received it
        self._finished = 0  # pieces that all their targets have received
        self._incoming: list[tuple[Incoming, list[int]]] = []
        self._outgoing: list[tuple[Outgoing, list[int]]] = []

    def streams(self, sockets: Sequence[socket.socket]) -> list[Stream]:
        """The streams that move the pieces."""
        for rank, sock in enumerate(sockets):
            self._receive_from(rank, sock)
            self._send_to(rank, sock)
        self._open_window()
        return [stream for stream, _ in self._incoming + self._outgoing]

    def _receive_from(self, rank: int, sock: socket.socket) -> None:
        leaves = [leaf for leaf, (source, _) in enumerate(self._leaves) if source == rank]
        if not self._leaves:  # an all-gather: the owner's values are the only leaf
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
        self._incoming.append((stream, [index for index, _ in items]))

    def _send_to(self, rank: int, sock: socket.socket) -> None:
        items = [index for index, piece in enumerate(self._pieces) if is_target(self._operation, piece, rank)]
        for index in items:
            self._unsent[index] += 1

        def sent(item: int) -> None:
            self._unsent[items[item]] -= 1
            self._open_window()

        stream = Outgoing(sock, rank, len(items), lambda item: self._bytes(items[item], 0), sent)
        stream.ready = 0
        self._outgoing.append((stream, items))

    def _complete(self, index: int) -> None:
        """Add up the leaves of a piece, all of which have arrived, and let the result be sent."""
        size = self._pieces[index].hi - self._pieces[index].lo
        self._buffers.add_up(index % WINDOW_PIECES, size, self._adds, self._kind)
        for stream, items in self._outgoing:
            while stream.ready < len(items) and self._missing[items[stream.ready]] == 0:
                stream.ready += 1
        self._open_window()

    def _open_window(self) -> None:
        """Let the ranks send the pieces for which there are buffers."""
        while self._finished < len(self._pieces) and not self._missing[self._finished] + self._unsent[self._finished]:
            self._finished += 1
        for stream, items in self._incoming:
            stream.ready = bisect_left(items, self._finished + WINDOW_PIECES)

    def _bytes(self, index: int, leaf: int) -> memoryview:
        size = self._pieces[index].hi - self._pieces[index].lo
        return self._buffers.bytes[index % WINDOW_PIECES][leaf][: size * ITEM_BYTES[self._kind]]
