"""The server of a star (see `andon.group.star`): serves the operations of its ranks, one after the other.

Of each part it holds one buffer per *leaf* (a row of a rank, see `andon.order`). It keeps a *window* of parts
open: a part is received, added when its last leaf is there, and sent; when all its targets have it, its
buffers serve the next part. A rank that runs ahead is not read from until then, and waits in its own send.
"""

from __future__ import annotations

import select
import socket
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final

import torch

from andon.group import serial
from andon.group.base import ProtocolError
from andon.group.door import Door
from andon.group.flow import Flow, Incoming, Outgoing
from andon.group.route import PIECE
from andon.group.star import LONGEST_MESSAGE, is_source, is_target, parts
from andon.group.watch import Watch
from andon.group.wire import LENGTH, Operation, decode
from andon.order import Order, plan_ranges

LONGEST_ANNOUNCEMENT: Final = 1 << 20
MOST_SLOTS: Final = 1 << 20
WINDOW: Final = 2
KINDS: Final = {
    "all-reduce": ("float32", "bf16"),
    "reduce-scatter": ("float32", "bf16"),
    "all-gather": ("uint8",),
    "gather of bytes": ("uint8",),
}


class StarServer:
    """Serves `world_size` ranks at `bind` (port 0: any); the token is what they must know."""

    def __init__(self, bind: tuple[str, int], world_size: int, timeout: float, token: str = "") -> None:
        self.world_size, self.timeout = world_size, timeout
        self._door = Door(*bind, world_size, token)
        self.address = self._door.address
        self._closed = False
        self._memory: Memory | None = None
        self._sockets: list[socket.socket] = []

    def serve(self) -> None:
        """Wait for the ranks and do what they ask until all have left; raises what breaks the group."""
        ranks = range(self.world_size)
        places = {(channel, rank) for channel in ("data", "watch") for rank in ranks}
        try:
            came = self._door.accept(places, self.timeout)
        except OSError:
            if not self._closed:
                raise
            return
        finally:
            self._door.close()
        self._sockets = [came["data", rank] for rank in ranks]
        watch = Watch({rank: came["watch", rank] for rank in ranks}, self._sockets, self.timeout)
        try:
            while self._someone_begins(watch):
                self._operate(watch)
        finally:
            watch.close()
            for sock in self._sockets:
                sock.close()

    def close(self) -> None:
        """Make `serve` end; safe to call twice, and from another thread."""
        self._closed = True
        self._door.interrupt()
        for sock in self._sockets:
            with suppress(OSError):  # its peer may have been faster
                sock.shutdown(socket.SHUT_RDWR)

    def _someone_begins(self, watch: Watch) -> bool:
        """Wait, as long as it takes, until a rank begins an operation; False when all have left."""
        poll = select.poll()
        waiting = {sock.fileno(): rank for rank, sock in enumerate(self._sockets)}
        for sock in self._sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            poll.register(sock, select.POLLIN)
        while waiting:
            for descriptor, _ in poll.poll():
                rank = waiting[descriptor]
                if _peek(self._sockets[rank]):
                    return True
                if self._closed:
                    return False
                if not watch.has_left(rank):
                    raise watch.lost(rank, "waiting for an operation", 0.0, "its connection was closed")
                poll.unregister(descriptor)
                del waiting[descriptor]
        return False

    def _operate(self, watch: Watch) -> None:
        operations = self._announcements(watch)
        first = operations[0]
        watch.begin(first.name)
        if first.name == "gather of bytes":
            lengths = [operation.count for operation in operations]
            table = memoryview(struct.pack(f"<{len(lengths)}Q", *lengths))
            flows = [
                Outgoing(sock, rank, [table].__getitem__, _nothing, 1)
                for rank, sock in enumerate(self._sockets)
            ]
            watch.carry(flows, first.name)
            passage = Passage("all-gather", (0, *accumulate(lengths)), "uint8", None, self._room_for(1))
        else:
            order = plan_ranges(first.slots, first.shares) if first.name != "all-gather" else None
            memory = self._room_for(len(order.leaves) if order else 1)
            passage = Passage(first.name, first.bounds, first.wire, order, memory)
        watch.carry(passage.flows(self._sockets), first.name)

    def _room_for(self, leaves: int) -> Memory:
        if self._memory is None or self._memory.leaves < leaves:
            self._memory = Memory(leaves)
        return self._memory

    def _announcements(self, watch: Watch) -> list[Operation]:
        """What each rank announces; all must say the same."""
        lengths = [bytearray(LENGTH.size) for _ in self._sockets]
        self._receive(watch, lengths)
        payloads = [bytearray(LENGTH.unpack(length)[0]) for length in self._checked(watch, lengths)]
        self._receive(watch, payloads)
        operations = []
        for rank, payload in enumerate(payloads):
            try:
                operations.append(_checked_operation(bytes(payload), self.world_size))
            except ProtocolError as error:
                raise watch.refuse(rank, str(error), "an announcement") from error
        same = [
            replace(operation, count=0) if operation.name == "gather of bytes" else operation
            for operation in operations
        ]
        usual, _ = Counter(same).most_common(1)[0]
        for rank, operation in enumerate(same):
            if operation != usual:
                raise watch.refuse(rank, f"it announced {operation}, others {usual}", "an announcement")
        return operations

    def _checked(self, watch: Watch, lengths: list[bytearray]) -> list[bytearray]:
        for rank, length in enumerate(lengths):
            if not 1 <= LENGTH.unpack(length)[0] <= LONGEST_ANNOUNCEMENT:
                raise watch.refuse(rank, "its announcement has an impossible length", "an announcement")
        return lengths

    def _receive(self, watch: Watch, buffers: Sequence[bytearray]) -> None:
        flows = [
            Incoming(sock, rank, [memoryview(buffer)].__getitem__, _nothing, 1)
            for rank, (sock, buffer) in enumerate(zip(self._sockets, buffers, strict=True))
        ]
        watch.carry(flows, "an announcement")


class Passage:
    """The parts of one operation on their way through the server."""

    def __init__(
        self, name: str, bounds: Sequence[int], kind: str, order: Order | None, memory: Memory
    ) -> None:
        self._name, self._kind, self._order, self._memory = name, kind, order, memory
        self._item_size = {"float32": 4, "bf16": 2, "uint8": 1}[kind]
        self._parts = parts(name, bounds, kind)
        self._leaves = order.leaves if order else []
        self._missing = [len(self._leaves) or 1] * len(self._parts)
        self._targets = [0] * len(self._parts)
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
        leaves = [leaf for leaf, (source, _) in enumerate(self._leaves) if source == rank] or [0]
        sources = [i for i, part in enumerate(self._parts) if is_source(self._name, part, rank)]
        if self._order and not self._order.nodes[rank]:
            sources = []
        items = [(part, leaf) for part in sources for leaf in leaves]

        def room(index: int) -> memoryview:
            return self._bytes(*items[index])

        def arrived(index: int) -> None:
            part, _ = items[index]
            self._missing[part] -= 1
            if self._missing[part] == 0:
                self._complete(part)

        flow = Incoming(sock, rank, room, arrived, len(items))
        self._arriving.append((flow, [part for part, _ in items]))

    def _send_to(self, rank: int, sock: socket.socket) -> None:
        wanted = [i for i, part in enumerate(self._parts) if is_target(self._name, part, rank)]
        result = len(self._leaves) if self._kind == "bf16" else 0
        for part in wanted:
            self._targets[part] += 1

        def piece(index: int) -> memoryview:
            return self._bytes(wanted[index], result)

        def sent(index: int) -> None:
            self._targets[wanted[index]] -= 1
            self._open_window()

        flow = Outgoing(sock, rank, piece, sent, len(wanted))
        flow.ready = 0
        self._leaving.append((flow, wanted))

    def _complete(self, part: int) -> None:
        """Every leaf of a part is there: add them, and let the result go."""
        size = self._parts[part].hi - self._parts[part].lo
        if self._order:
            self._memory.add_up(part % WINDOW, size, self._order, self._kind)
        for flow, wanted in self._leaving:
            while flow.ready < len(wanted) and self._missing[wanted[flow.ready]] == 0:
                flow.ready += 1
        self._open_window()

    def _open_window(self) -> None:
        """Let the ranks send what there is room for."""
        while (
            self._finished < len(self._parts)
            and self._missing[self._finished] == 0
            and self._targets[self._finished] == 0
        ):
            self._finished += 1
        for flow, sources in self._arriving:
            flow.ready = bisect_left(sources, self._finished + WINDOW)

    def _bytes(self, part: int, buffer: int) -> memoryview:
        size = self._parts[part].hi - self._parts[part].lo
        return self._memory.bytes[part % WINDOW][buffer][: size * self._item_size]


class Memory:
    """The buffers of a window: for each part one per leaf, and one for a rounded sum."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self._buffers = torch.empty(WINDOW, leaves + 1, 4 * PIECE, dtype=torch.uint8)
        self._work = torch.empty(leaves, PIECE)
        windows = [window.numpy() for window in self._buffers]
        self.bytes: list[list[memoryview]] = [[buffer.data for buffer in window] for window in windows]

    def add_up(self, window: int, size: int, order: Order, kind: str) -> None:
        """Add the leaves of a part in the one order; the sum ends in the first, or rounded in the last."""
        count = len(order.leaves)
        if kind == "float32":
            serial.add_up(order, list(self._buffers[window].view(torch.float32).numpy()[:count, :size]))
            return
        halves = self._buffers[window].view(torch.bfloat16)[:, :size]
        for row, half in zip(self._work[:count], halves, strict=False):
            serial.copy(row[:size], half)
        serial.add_up(order, list(self._work.numpy()[:count, :size]))
        serial.copy(halves[count], self._work[0][:size])


def _checked_operation(payload: bytes, world_size: int) -> Operation:
    """The operation in a payload, with everything that could make the server stumble refused."""
    operation = decode(payload)
    if not isinstance(operation, Operation):
        raise ProtocolError(f"{type(operation).__name__} instead of an operation")
    kinds = KINDS.get(operation.name, ())
    if operation.wire not in kinds:
        raise ProtocolError(f"there is no {operation.name!r} of {operation.wire!r}")
    if operation.name == "gather of bytes":
        if operation.count > LONGEST_MESSAGE:
            raise ProtocolError(f"a small message of {operation.count:,} bytes")
        return operation
    if not _are_bounds(
        operation.bounds, operation.count, 2 if operation.name == "all-reduce" else world_size + 1
    ):
        raise ProtocolError("its bounds do not cut up its elements")
    if operation.name != "all-gather" and not (
        1 <= operation.slots <= MOST_SLOTS and _are_bounds(operation.shares, operation.slots, world_size + 1)
    ):
        raise ProtocolError("its shares do not cut up its slots")
    return operation


def _are_bounds(bounds: Sequence[int], total: int, count: int) -> bool:
    return (
        len(bounds) == count
        and bounds[0] == 0
        and bounds[-1] == total
        and all(lo <= hi for lo, hi in pairwise(bounds))
    )


def _peek(sock: socket.socket) -> bool:
    """Whether a readable socket has data, rather than its end."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def _nothing(index: int) -> None:
    pass
