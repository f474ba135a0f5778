"""The star: every rank talks to one server, which adds in the one order and sends the sums back.

An operation is cut into *parts*. A part has *sources*, the ranks whose values it takes, and *targets*, the
ranks that get its *results*: for an all-reduce both are everyone, for an all-gather the source is the part's
owner and the targets are the others, for a reduce-scatter the sources are the others and the target is the
owner. A rank announces the operation and then sends its parts and receives its results at the same time;
part k comes back while part k + 1 is being added and part k + 2 is on its way. So neither end holds more than
a few parts, whatever the length of the vector.

In a reduce-scatter the owner of a part keeps its rows of it. The server adds up what the others' rows come to
without them, which takes a few sums (see `andon.engine.order.apart`), and the owner adds those to its own: so
a rank sends as much in a reduce-scatter and an all-gather together as in an all-reduce.

With bf16 on the wire contributions are rounded, added in f32, and the sum is rounded. What the server has
added for an owner travels as f32. A gather on its own is exact.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, pairwise
from typing import Final

import torch

from andon.engine.order import Order, apart
from andon.transport.base import Group, Rendezvous, Wire, first_row, one_node_each, rows_of
from andon.transport.staging import on_host
from andon.transport.tcp.connect import knock
from andon.transport.tcp.encoding import Exact, Form, Scratch, Span, form_for
from andon.transport.tcp.failure_detector import Watch
from andon.transport.tcp.frames import Hello, announcement
from andon.transport.tcp.ring_schedule import check_bounds
from andon.transport.tcp.star_parts import Arriving, OwnParts, Results, is_source, is_target, parts
from andon.transport.tcp.stream import Incoming, Outgoing

SERVER: Final = -1
"""The rank of the server, in errors."""
LONGEST_MESSAGE: Final = 1 << 26


class StarGroup(Group):
    """A rank of a star. Its server is a `StarServer`."""

    def __init__(
        self, rank: int, world_size: int, data: socket.socket, watch: Watch, form: type[Form]
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._data, self._watch = data, watch
        self._form, self._scratch = form, Scratch()

    @classmethod
    def open(
        cls, rendezvous: Rendezvous, address: tuple[str, int], timeout: float, wire: Wire, token: str = ""
    ) -> StarGroup:
        """Connect to the server at `address`."""
        rank, size, form = rendezvous.rank, rendezvous.world_size, form_for(wire)
        with ExitStack() as undo:
            data = knock(address, SERVER, Hello(rank, size, "data", token), timeout)
            undo.callback(data.close)
            link = knock(address, SERVER, Hello(rank, size, "watch", token), timeout)
            undo.pop_all()
        return cls(rank, size, data, Watch({SERVER: link}, [data], timeout), form)

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        self._reduce("all-reduce", nodes, (0, nodes.shape[-1]), order)

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        self._reduce("reduce-scatter", nodes, bounds, order)

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        with on_host(flat) as host:
            size = host.element_size()
            whole = Exact(host.view(torch.uint8), self._scratch)
            self._operate("all-gather", [whole], whole, [size * bound for bound in bounds], None)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        if len(data) > LONGEST_MESSAGE:
            raise ValueError(f"{len(data):,} bytes are too long for a small message")
        name = "gather of bytes"
        header = announcement(name, len(data), "uint8", (), None)
        lengths = torch.empty(self.world_size, dtype=torch.int64)
        views = [memoryview(header), memoryview(data)], [lengths.view(torch.uint8).numpy().data]
        self._watch.begin(name)
        self.bytes_sent += len(data)
        self._carry(name, *views)
        bounds = [0, *accumulate(lengths.tolist())]
        if not all(lo <= hi <= lo + LONGEST_MESSAGE for lo, hi in pairwise(bounds)):
            raise self._watch.refuse(SERVER, "it announced impossible lengths", name)
        whole = bytearray(bounds[-1])
        whole[bounds[self.rank] : bounds[self.rank + 1]] = data
        cut = [part for part in parts("all-gather", bounds, "uint8") if part.owner != self.rank]
        self._carry(name, [], [memoryview(whole)[part.lo : part.hi] for part in cut])
        return [bytes(whole[lo:hi]) for lo, hi in pairwise(bounds)]

    def close(self) -> None:
        self._watch.close()
        self._data.close()

    def _reduce(self, name: str, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None) -> None:
        if nodes.dtype != torch.float32:
            raise ValueError(f"only float32 can be summed, not {nodes.dtype}")
        order = order or one_node_each(self.world_size)
        with on_host(nodes) as host:
            mine = rows_of(host, order, self.rank)
            rows = [self._form(row, self._scratch) for row in mine]
            into = self._form(first_row(host), self._scratch)
            if name == "all-reduce":
                self._operate(name, rows, into, bounds, order)
            else:
                adds = apart(order, self.rank)
                receive = partial(OwnParts, mine or [first_row(host)], not mine, adds, self._scratch)
                self._operate(name, rows, into, bounds, order, receive)

    def _operate(
        self,
        name: str,
        rows: Sequence[Form],
        into: Form,
        bounds: Sequence[int],
        order: Order | None,
        receive: Callable[[Form, Sequence[Span]], Results] = Arriving,
    ) -> None:
        """Announce an operation, send my rows of the parts I am a source of and receive into `into`."""
        if name != "all-reduce":
            check_bounds(bounds, into.count, self.world_size)
        header = announcement(name, into.count, into.kind, tuple(bounds), order)
        cut = parts(name, bounds, into.kind)
        spans = [(part.lo, part.hi) for part in cut if is_source(name, part, self.rank)]
        results = receive(into, [(part.lo, part.hi) for part in cut if is_target(name, part, self.rank)])

        def outgoing(index: int) -> memoryview:
            if index == 0:
                return memoryview(header)
            part, row = divmod(index - 1, len(rows))
            return rows[row].outgoing(spans[part], -1)

        self._watch.begin(name)
        self.bytes_sent += len(rows) * into.item_size * sum(hi - lo for lo, hi in spans)
        out = Outgoing(self._data, SERVER, outgoing, _nothing, 1 + len(spans) * len(rows))
        self._watch.carry(
            [Incoming(self._data, SERVER, results.room, results.arrived, results.count), out],
            name,
            patience=self._watch.timeout / 2,
        )

    def _carry(self, name: str, out: Sequence[memoryview], into: Sequence[memoryview]) -> None:
        flows = [
            Incoming(self._data, SERVER, into.__getitem__, _nothing, len(into)),
            Outgoing(self._data, SERVER, out.__getitem__, _nothing, len(out)),
        ]
        self._watch.carry(flows, name, patience=self._watch.timeout / 2)


def _nothing(index: int) -> None:
    pass
