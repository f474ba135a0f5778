"""The star: every rank exchanges with one server, which adds in the one order and sends the results.

A rank announces an operation. Then it sends values and receives results at the same time, piece by piece: piece k
comes back while the server adds piece k + 1 and receives piece k + 2. `andon.transport.tcp.star_pipeline` defines which
rank sends and receives which piece. Neither end holds more than a few pieces, whatever the length of the vector.
"""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, Self

import torch

from andon.engine.gradients.order import Order
from andon.transport.base import Group, Rendezvous, Settings
from andon.transport.keys import SERVER
from andon.transport.rows import Wire, check_bounds, one_node_each
from andon.transport.tcp.connect import connect
from andon.transport.tcp.encoding import ENCODINGS, F32, Encoding, Scratch, contribution, on_host
from andon.transport.tcp.failure_detector import FailureDetector
from andon.transport.tcp.frames import Hello, announcement
from andon.transport.tcp.star_pipeline import cut, is_source, is_target
from andon.transport.tcp.stream import Incoming, Outgoing

JOIN_TIMEOUTS: Final = 5
"""How many timeouts a rank waits for the last one to join, which may load torch from a slow disk."""


class StarGroup(Group):
    """A rank of a star. Its server is a `StarServer`."""

    transport = "star"

    def __init__(
        self, rank: int, world_size: int, data: socket.socket, detector: FailureDetector, wire: Wire = "f32"
    ) -> None:
        self.rank, self.world_size, self.wire = rank, world_size, wire
        self._data, self._detector = data, detector
        self._encoding, self._scratch = ENCODINGS[wire], Scratch()

    @classmethod
    def open(cls, rendezvous: Rendezvous, settings: Settings) -> Self:
        """Connect to the server."""
        server, keys = settings.server, settings.keys
        if server is None or keys is None:
            raise ValueError("transport 'star' needs the address of its server and the keys of its links")
        rank, size, timeout = rendezvous.rank, rendezvous.world_size, settings.timeout
        with ExitStack() as undo:

            def connect_to_server(channel: str) -> socket.socket:
                hello = Hello(rank, size, keys.generation, channel)
                return undo.enter_context(connect(server, SERVER, hello, keys.of(SERVER), timeout, settings.tls))

            data, link = connect_to_server("data"), connect_to_server("heartbeat")
            undo.pop_all()
        group = cls(rank, size, data, FailureDetector({SERVER: link}, [data], timeout), settings.wire)
        settings.watch(group)
        return group

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        self._reduce("all-reduce", nodes, (0, nodes.shape[-1]), order)

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        check_bounds(bounds, nodes.shape[-1], self.world_size)
        self._reduce("reduce-scatter", nodes, bounds, order)

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        check_bounds(bounds, flat.numel(), self.world_size)
        with on_host(flat) as host:
            whole = F32(host.view(torch.uint8), self._scratch)
            self._operate("all-gather", [whole], whole, [host.element_size() * bound for bound in bounds], None)

    def leave(self) -> None:
        self._detector.close()

    def abort(self, rank: int, detail: str) -> None:
        self._detector.abort(rank, detail)

    def _reduce(self, operation: str, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None) -> None:
        order = order or one_node_each(self.world_size)
        with contribution(nodes, order, self.rank) as (total, rows):
            encoded = [self._encoding(row, self._scratch) for row in rows]
            self._operate(operation, encoded, self._encoding(total, self._scratch), bounds, order)

    def _operate(
        self, operation: str, rows: Sequence[Encoding], into: Encoding, bounds: Sequence[int], order: Order | None
    ) -> None:
        """Announce an operation, send the pieces of `rows` and receive results into `into`."""
        header = announcement(operation, into.count, into.kind, tuple(bounds), order)
        pieces = cut(bounds, into.kind)
        to_send = [(piece.lo, piece.hi) for piece in pieces if is_source(operation, piece, self.rank)]
        to_receive = [(piece.lo, piece.hi) for piece in pieces if is_target(operation, piece, self.rank)]

        def outgoing(index: int) -> memoryview:
            if index == 0:
                return memoryview(header)
            piece, row = divmod(index - 1, len(rows))
            return rows[row].outgoing(to_send[piece], -1)

        def incoming(index: int) -> memoryview:
            return into.incoming(to_receive[index], index, False)

        def arrived(index: int) -> None:
            into.arrived(to_receive[index], index, False, False)

        # The server sends its first heartbeat when all ranks have connected.
        self._detector.wait_for_first_heartbeat(SERVER, JOIN_TIMEOUTS * self._detector.timeout)
        self._detector.begin(operation)
        self.bytes_sent += len(rows) * into.item_size * sum(hi - lo for lo, hi in to_send)
        results = Incoming(self._data, SERVER, len(to_receive), incoming, arrived)
        values = Outgoing(self._data, SERVER, 1 + len(to_send) * len(rows), outgoing)
        self._detector.run([results, values], operation, patience=self._detector.timeout / 2)
