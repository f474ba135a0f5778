"""The server of a star (see `andon.transport.tcp.star`): serves the operations of its ranks, one after the
other.

Ranks announce an operation, all of them the same, and its parts pass through
(`andon.transport.tcp.star_pipeline`).
"""

from __future__ import annotations

import select
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Final

from andon.engine.order import plan_ranges
from andon.transport.base import ProtocolError
from andon.transport.tcp.connect import Door
from andon.transport.tcp.failure_detector import Watch
from andon.transport.tcp.frames import LENGTH, Operation, decode
from andon.transport.tcp.star import LONGEST_MESSAGE
from andon.transport.tcp.star_pipeline import Memory, Passage
from andon.transport.tcp.stream import Incoming, Outgoing

LONGEST_ANNOUNCEMENT: Final = 1 << 20
MOST_SLOTS: Final = 1 << 20
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
