"""How the parts of an operation pass through the server of a star (see `andon.transport.tcp.star`).

Of each part the server holds one buffer per *leaf* (a row of a rank, see `andon.engine.order`). It keeps a
*window* of parts open: a part is received, added when its last leaf is there, and sent; when all its targets
have it, its buffers serve the next part. A rank that runs ahead is not read from until then, and waits in its
own send.
"""

from __future__ import annotations

import socket
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np

from andon.engine.order import Apart, Order
from andon.transport.tcp import arithmetic as serial
from andon.transport.tcp.encoding import PIECE, arithmetic
from andon.transport.tcp.star_parts import (
    ITEM_SIZES,
    adds_of,
    is_source,
    is_target,
    kind_of_sums,
    parts,
    result_sizes,
)
from andon.transport.tcp.stream import Flow, Incoming, Outgoing

WINDOW: Final = 2


class Passage:
    """The parts of one operation on their way through the server."""

    def __init__(
        self, name: str, bounds: Sequence[int], kind: str, order: Order | None, memory: Memory
    ) -> None:
        self._name, self._kind, self._order, self._memory = name, kind, order, memory
        self._parts = parts(name, bounds, kind)
        self._adds = [adds_of(name, order, owner) for owner in range(len(bounds) - 1)]
        self._missing = [0] * len(self._parts)  # leaves of each part that have not arrived
        self._unsent = [0] * len(self._parts)  # results of each part that have not left
        self._finished = 0
        self._arriving: list[tuple[Incoming, list[int]]] = []
        self._leaving: list[tuple[Outgoing, list[int]]] = []

    def flows(self, sockets: Sequence[socket.socket]) -> list[Flow]:
        """What moves the parts."""
        for rank, sock in enumerate(sockets):
            self._receive_from(rank, sock)
            self._send_to(rank, sock)
        self._open_window()
        return [flow for flow, _ in self._arriving + self._leaving]

    def _receive_from(self, rank: int, sock: socket.socket) -> None:
        leaves = (
            [leaf for leaf, (owner, _) in enumerate(self._order.leaves) if owner == rank]
            if self._order
            else [0]
        )
        sources = [i for i, part in enumerate(self._parts) if is_source(self._name, part, rank)]
        items = [(part, leaf) for part in sources for leaf in leaves]
        for part, _ in items:
            self._missing[part] += 1

        def room(index: int) -> memoryview:
            return self._bytes(*items[index], ITEM_SIZES[self._kind])

        def arrived(index: int) -> None:
            part, _ = items[index]
            self._missing[part] -= 1
            if self._missing[part] == 0:
                self._complete(part)

        flow = Incoming(sock, rank, room, arrived, len(items))
        self._arriving.append((flow, [part for part, _ in items]))

    def _send_to(self, rank: int, sock: socket.socket) -> None:
        items = [
            (index, leaf, size)
            for index, part in enumerate(self._parts)
            if is_target(self._name, part, rank)
            for leaf, size in result_sizes(self._name, self._kind, self._adds[part.owner])
        ]
        for part, *_ in items:
            self._unsent[part] += 1

        def piece(index: int) -> memoryview:
            return self._bytes(*items[index])

        def sent(index: int) -> None:
            self._unsent[items[index][0]] -= 1
            self._open_window()

        flow = Outgoing(sock, rank, piece, sent, len(items))
        flow.ready = 0
        self._leaving.append((flow, [part for part, *_ in items]))

    def _complete(self, part: int) -> None:
        """Every leaf of a part is there: add them, and let the results go."""
        size, adds = self._parts[part].hi - self._parts[part].lo, self._adds[self._parts[part].owner]
        self._memory.add_up(part % WINDOW, size, adds, self._kind, kind_of_sums(self._name, self._kind))
        for flow, wanted in self._leaving:
            while flow.ready < len(wanted) and self._missing[wanted[flow.ready]] == 0:
                flow.ready += 1
        self._open_window()

    def _open_window(self) -> None:
        """Let the ranks send what there is room for."""
        while (
            self._finished < len(self._parts)
            and self._missing[self._finished] == 0
            and self._unsent[self._finished] == 0
        ):
            self._finished += 1
        for flow, sources in self._arriving:
            flow.ready = bisect_left(sources, self._finished + WINDOW)

    def _bytes(self, part: int, leaf: int, item_size: int) -> memoryview:
        size = self._parts[part].hi - self._parts[part].lo
        return self._memory.bytes[part % WINDOW][leaf][: size * item_size]


class Memory:
    """The buffers of a window: for each part one per leaf."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self._buffers = np.empty((WINDOW, leaves, 4 * PIECE), np.uint8)
        self._work = np.empty((leaves, PIECE), np.float32)
        self.bytes: list[list[memoryview]] = [[buffer.data for buffer in window] for window in self._buffers]

    def add_up(self, window: int, size: int, adds: Apart, kind: str, kind_of_sums: str) -> None:
        """Do the additions of a part; each sum ends where its first leaf was."""
        floats = self._buffers[window].view(np.float32)[:, :size]
        if kind != "bf16":
            serial.add_up(adds.others, list(floats))
            return
        halves, work = self._buffers[window].view(np.uint16)[:, :size], self._work[:, :size]
        for leaf in {leaf for pair in adds.others for leaf in pair}:
            arithmetic().widen(halves[leaf], work[leaf])
        serial.add_up(adds.others, list(work))
        for leaf in adds.sums.intersection(adds.given):
            if kind_of_sums == "bf16":
                arithmetic().round_off(work[leaf], halves[leaf])
            else:
                floats[leaf] = work[leaf]
