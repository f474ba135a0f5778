"""The ring: each rank sends to its right neighbour and receives from its left one, at the same time.

The vector is cut into one *chunk* per rank. In the reduce-scatter, N - 1 *rounds*, every rank passes a chunk on and
adds its own values to the one that arrives, until rank r holds the sum of chunk r. In the all-gather, again N - 1
rounds, the sums go round once. Every chunk that arrives is passed on in the next round, except the last; so an
operation is one outgoing and one incoming stream, and the piece that arrives as number i leaves as number
i + (pieces of the first chunk). Rounds need no barrier: a piece is passed on as soon as it has been added
(`andon.transport.tcp.ring_schedule` has the order of the pieces).

All ranks end with the same bits (C-RING-001; `andon.transport.mean` divides by their number). A rank sends 2(N - 1)/N
of the vector and not more. With a bf16 wire, everything sent is rounded, sums are taken in f32 and rounded, and the
owner of a chunk keeps the rounded sum, so that all ranks end with the same bits. A plain all-gather is exact. With more
than two ranks the order of addition is not the one order but the ring's.
"""

import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Self

import torch

from andon.engine.gradients.order import Order, shares
from andon.transport.base import SOMEONE, Group, PeerLost, Rendezvous, Settings
from andon.transport.rows import Wire, check_bounds, one_node_each
from andon.transport.tcp.connect import Acceptor, Channel, agree_on_keys, connect
from andon.transport.tcp.encoding import ENCODINGS, F32, Encoding, Scratch, add, contribution, on_host
from andon.transport.tcp.failure_detector import FailureDetector
from andon.transport.tcp.frames import Hello, announcement, difference
from andon.transport.tcp.ring_schedule import ring_schedule
from andon.transport.tcp.stream import Incoming, Outgoing


class RingGroup(Group):
    """A rank of a ring over TCP."""

    transport = "ring"

    def __init__(
        self, rank: int, left: socket.socket, right: socket.socket, detector: FailureDetector, wire: Wire = "f32"
    ) -> None:
        self.rank, self.world_size, self.wire = rank, len(detector.links) + 1, wire
        self._left, self._right, self._detector = left, right, detector
        self._encoding, self._scratch = ENCODINGS[wire], Scratch()

    @classmethod
    def open(cls, rendezvous: Rendezvous, settings: Settings) -> Self:
        """Connect to both neighbours for data, and to all ranks for heartbeats."""
        rank, size, timeout = rendezvous.rank, rendezvous.world_size, settings.timeout
        if size == 1:
            left, right = socket.socketpair()
            left.setblocking(False)
            return cls(rank, left, right, FailureDetector({}, [left, right], timeout), settings.wire)
        keys, tls = settings.keys or agree_on_keys(rendezvous, settings.host), settings.tls
        if tls:
            tls.check_accepts()
        with ExitStack() as undo:
            acceptor = undo.enter_context(closing(Acceptor(settings.host, 0, size, keys, tls)))
            opening = _Opening(acceptor)
            settings.watch(opening)
            addresses = rendezvous.exchange("ring", " ".join(map(str, acceptor.address)))

            def connect_to(peer: int, channel: str) -> socket.socket:
                host, port = addresses[peer].split()
                hello = Hello(rank, size, keys.generation, channel)
                return undo.enter_context(connect((host, int(port)), peer, hello, keys.of(peer), timeout, tls))

            from_left = ("data", (rank - 1) % size)
            expected = {from_left} | {("heartbeat", peer) for peer in range(rank + 1, size)}
            # Both ends of a connection authenticate, so every rank must accept and connect at the same time.
            pool = ThreadPoolExecutor(1, "andon-accept")
            accepting = pool.submit(acceptor.accept, expected, timeout)
            undo.callback(_close_accepted, accepting)
            undo.enter_context(pool)
            undo.callback(acceptor.interrupt)
            right = connect_to((rank + 1) % size, "data")
            links = {peer: connect_to(peer, "heartbeat") for peer in range(rank)}
            accepted = opening.wait(accepting)
            left = accepted.pop(from_left)
            links |= {peer: sock for (_, peer), sock in accepted.items()}
            undo.pop_all()
        pool.shutdown()
        acceptor.close()
        group = cls(rank, left, right, FailureDetector(links, [left, right], timeout), settings.wire)
        settings.watch(group)
        return group

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        self._reduce("all-reduce", nodes, shares(nodes.shape[-1], self.world_size), order)

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        self._reduce("reduce-scatter", nodes, bounds, order)

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        with on_host(flat) as host:
            self._circulate("all-gather", F32(host, self._scratch), tuple(bounds), None)

    def leave(self) -> None:
        self._detector.close()

    def abort(self, rank: int, detail: str) -> None:
        self._detector.abort(rank, detail)

    def _reduce(self, operation: str, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None) -> None:
        order = order or one_node_each(self.world_size)
        with contribution(nodes, order, self.rank) as (total, rows):
            if not rows:
                total.zero_()
            for row in rows[1:]:
                add(total.numpy(), row.numpy())
            self._circulate(operation, self._encoding(total, self._scratch), tuple(bounds), order)

    def _circulate(self, operation: str, values: Encoding, bounds: tuple[int, ...], order: Order | None) -> None:
        """Pass chunks round the ring: first those to be added up, then the sums."""
        rank, size = self.rank, self.world_size
        left, right = (rank - 1) % size, (rank + 1) % size
        check_bounds(bounds, values.count, size)
        added = [(left - 1 - turn) % size for turn in range(size - 1)] if operation != "all-gather" else []
        kept = [(left - turn) % size for turn in range(size - 1)] if operation != "reduce-scatter" else []
        first = rank if operation == "all-gather" else left
        schedule = ring_schedule(bounds, (first, *added, *kept), values.piece_size)
        header = memoryview(announcement(operation, values.count, values.kind, bounds, order))
        their_header = memoryview(bytearray(len(header)))

        def outgoing(index: int) -> memoryview:
            if index == 0:
                return header
            return values.outgoing(schedule.leaving[index - 1], schedule.sources[index - 1])

        def incoming(index: int) -> memoryview:
            if index == 0:
                return their_header
            return values.incoming(schedule.arriving[index - 1], index - 1, schedule.rounds[index - 1] < len(added))

        def arrived(index: int) -> None:
            if index == 0:
                if their_header != header:
                    raise self._detector.refuse(left, difference(bytes(their_header), bytes(header)), operation)
                return
            turn = schedule.rounds[index - 1]
            values.arrived(schedule.arriving[index - 1], index - 1, turn < len(added), turn == len(added) - 1)
            out.ready = schedule.may_leave[index] + 1

        def sent(index: int) -> None:
            if values.waits_in_buffer:
                into.ready = schedule.may_arrive[index] + 1

        out = Outgoing(self._right, right, len(schedule.leaving) + 1, outgoing, sent)
        into = Incoming(self._left, left, len(schedule.arriving) + 1, incoming, arrived)
        out.ready = schedule.may_leave[0] + 1
        sent(0)
        self._detector.begin(operation)
        if size == 1:
            values.round()
        self._detector.run([into, out], operation)
        self.bytes_sent += values.item_size * sum(hi - lo for lo, hi in schedule.leaving)


class _Opening:
    """A ring that is being opened: `abort` makes this rank stop waiting for connections."""

    def __init__(self, acceptor: Acceptor) -> None:
        self._acceptor = acceptor
        self._lost: tuple[int, str] | None = None

    def abort(self, rank: int, detail: str) -> None:
        self._lost = rank, detail
        self._acceptor.interrupt()

    def wait(self, accepting: Future[dict[Channel, socket.socket]]) -> dict[Channel, socket.socket]:
        """Wait for the accepted connections; `PeerLost` if the wait was aborted."""
        try:
            return accepting.result()
        except OSError as error:
            rank, detail = self._lost or (SOMEONE, str(error))
            raise PeerLost(rank, "connecting", 0.0, detail) from error


def _close_accepted(accepting: Future[dict[Channel, socket.socket]]) -> None:
    """Close the connections that were accepted before the ring failed to open."""
    if not accepting.exception():
        for sock in accepting.result().values():
            sock.close()
