"""The ring: each rank sends to its right neighbour and receives from its left one, at the same time.

The vector is cut into one *chunk* per rank. In the scatter-reduce, N - 1 *rounds*, every rank passes a chunk
on and adds its own values to the one that arrives, until rank r holds the sum of chunk r. In the all-gather,
again N - 1 rounds, the sums travel round once. Everything that arrives is passed on in the next round, except
the last chunk; so an operation is just two flows, where piece i of what arrived is piece i + (pieces of the
first chunk) of what leaves. Rounds need no barrier: a piece is passed on as soon as it has been added.

A rank sends 2(N - 1)/N of the vector and not more. With bf16 on the wire whatever is sent is rounded, a rank
adds its values to it in f32, and the owner of a chunk keeps its sum as it travels, so that all end with the
same bits. A gather on its own is exact. The order of addition is the ring's own, except with two ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from andon.engine.order import Order, shares
from andon.transport.base import Group, Rendezvous, Settings, check_bounds, first_row, one_node_each, rows_of
from andon.transport.tcp.connect import Door, knock
from andon.transport.tcp.encoding import F32, Encoding, Scratch, add, encoding_for, on_host
from andon.transport.tcp.failure_detector import Watch
from andon.transport.tcp.frames import Hello, announcement, differ
from andon.transport.tcp.ring_schedule import route
from andon.transport.tcp.stream import Incoming, Outgoing


class RingGroup(Group):
    """A rank of a ring over TCP."""

    transport = "ring"

    def __init__(
        self, rank: int, left: socket.socket, right: socket.socket, watch: Watch, form: type[Encoding]
    ) -> None:
        self.rank, self.world_size = rank, len(watch.peers) + 1
        self._left, self._right, self._watch = left, right, watch
        self._form, self._scratch = form, Scratch()

    @classmethod
    def open(cls, rendezvous: Rendezvous, settings: Settings) -> RingGroup:
        """Connect with both neighbours, and with everyone for the watch."""
        rank, size, timeout = rendezvous.rank, rendezvous.world_size, settings.timeout
        form = encoding_for(settings.wire)
        if size == 1:
            left, right = socket.socketpair()
            left.setblocking(False)
            return cls(rank, left, right, Watch({}, [left, right], timeout), form)
        with ExitStack() as undo:
            door = Door(settings.host, 0, size)
            undo.callback(door.close)
            words = rendezvous.exchange("ring", f"{door.address[0]} {door.address[1]} {door.token}")

            def connect(peer: int, channel: str) -> socket.socket:
                its_host, its_port, token = words[peer].split()
                sock = knock((its_host, int(its_port)), peer, Hello(rank, size, channel, token), timeout)
                undo.callback(sock.close)
                return sock

            right = connect((rank + 1) % size, "data")
            links = {peer: connect(peer, "watch") for peer in range(rank)}
            before = ("data", (rank - 1) % size)
            came = door.accept({before} | {("watch", peer) for peer in range(rank + 1, size)}, timeout)
            door.close()
            left = came.pop(before)
            links |= {peer: sock for (_, peer), sock in came.items()}
            undo.pop_all()
        return cls(rank, left, right, Watch(links, [left, right], timeout), form)

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        order = order or one_node_each(self.world_size)
        bounds = shares(nodes.shape[-1], self.world_size)
        with on_host(nodes) as host:
            form = self._own_sum(host, order)
            self._circulate("all-reduce", form, bounds, order, adds=True, gathers=True)

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        order = order or one_node_each(self.world_size)
        with on_host(nodes) as host:
            form = self._own_sum(host, order)
            self._circulate("reduce-scatter", form, bounds, order, adds=True, gathers=False)

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        with on_host(flat) as host:
            self._circulate("all-gather", F32(host, self._scratch), bounds, None, adds=False, gathers=True)

    def close(self) -> None:
        self._watch.close()
        self._left.close()
        self._right.close()

    def _own_sum(self, nodes: torch.Tensor, order: Order) -> Encoding:
        """The sum of my own rows, as it travels."""
        if nodes.dtype != torch.float32:
            raise ValueError(f"only float32 can be summed, not {nodes.dtype}")
        total, rows = first_row(nodes), rows_of(nodes, order, self.rank)
        if not rows:
            total.zero_()
        for row in rows[1:]:
            add(total.numpy(), row.numpy())
        return self._form(total, self._scratch)

    def _circulate(
        self,
        name: str,
        form: Encoding,
        bounds: Sequence[int],
        order: Order | None,
        *,
        adds: bool,
        gathers: bool,
    ) -> None:
        """Let chunks go round: those to be added first, then those to be kept."""
        rank, size = self.rank, self.world_size
        check_bounds(bounds, form.count, size)
        added = [(rank - 2 - turn) % size for turn in range(size - 1)] if adds else []
        kept = [(rank - 1 - turn) % size for turn in range(size - 1)] if gathers else []
        first = (rank - 1) % size if adds else rank
        bounds = tuple(bounds)
        way = route(bounds, (first, *added, *kept), form.step)
        header = memoryview(announcement(name, form.count, form.kind, bounds, order))
        theirs = memoryview(bytearray(len(header)))

        def outgoing(index: int) -> memoryview:
            return form.outgoing(way.leaving[index - 1], way.sources[index - 1]) if index else header

        def incoming(index: int) -> memoryview:
            if index == 0:
                return theirs
            return form.incoming(way.arriving[index - 1], index - 1, way.turns[index - 1] < len(added))

        def arrived(index: int) -> None:
            if index == 0:
                return self._check(bytes(theirs), bytes(header), name)
            turn = way.turns[index - 1]
            form.arrived(way.arriving[index - 1], index - 1, turn < len(added), turn == len(added) - 1)
            out.ready = way.ready[index] + 1

        def sent(index: int) -> None:
            if form.waits_in_buffer:
                into.ready = way.room[index] + 1

        out = Outgoing(self._right, (rank + 1) % size, outgoing, sent, len(way.leaving) + 1)
        into = Incoming(self._left, (rank - 1) % size, incoming, arrived, len(way.arriving) + 1)
        out.ready = way.ready[0] + 1
        sent(0)
        self._watch.begin(name)
        if size == 1:
            form.round()
        self._watch.carry([into, out], name)
        self.bytes_sent += form.item_size * sum(hi - lo for lo, hi in way.leaving)

    def _check(self, theirs: bytes, mine: bytes, name: str) -> None:
        if theirs != mine:
            raise self._watch.refuse((self.rank - 1) % self.world_size, differ(theirs, mine), name)
