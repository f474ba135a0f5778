"""The server of a star (see `andon.transport.tcp.star`): it serves the ranks' operations one after the other.

All ranks announce the same operation; then its pieces pass through (`andon.transport.tcp.star_pipeline`).
"""

import math
import select
import socket
from collections import Counter
from collections.abc import Generator
from contextlib import closing, suppress
from typing import Final, Literal

from andon.engine.gradients.order import MOST_SLOTS, order_of_ranges
from andon.transport.base import ProtocolError
from andon.transport.keys import LinkKeys
from andon.transport.rows import are_bounds
from andon.transport.tcp.connect import Acceptor
from andon.transport.tcp.entrance.tls import Tls
from andon.transport.tcp.failure_detector import FailureDetector
from andon.transport.tcp.frames import Operation, decode
from andon.transport.tcp.star_pipeline import Pipeline, PipelineBuffers
from andon.transport.tcp.stream import MessageReader, read_frame

MAX_ANNOUNCEMENT_BYTES: Final = 1 << 20
MAX_ELEMENTS: Final = 1 << 35
"""Of one operation: more than any model here has parameters, and few enough to keep a list of their pieces."""
KINDS: Final = {"all-reduce": ("float32", "bf16"), "reduce-scatter": ("float32", "bf16"), "all-gather": ("uint8",)}


class StarServer:
    """Serves `world_size` ranks at `bind` (port 0: any free port); `keys` are those of rank `SERVER`."""

    def __init__(
        self, bind: tuple[str, int], world_size: int, timeout: float, keys: LinkKeys, tls: Tls | None = None
    ) -> None:
        self.world_size, self.timeout = world_size, timeout
        self._acceptor = Acceptor(*bind, world_size, keys, tls)
        self.address = self._acceptor.address
        self._closed = False
        self._buffers = PipelineBuffers(1)
        self._sockets: list[socket.socket] = []

    def serve(self) -> None:
        """Wait for the ranks without a deadline and serve them until all have left; raises if the group breaks."""
        ranks = range(self.world_size)
        expected = {(channel, rank) for channel in ("data", "heartbeat") for rank in ranks}
        try:
            accepted = self._acceptor.accept(expected, math.inf)
        except OSError:
            if not self._closed:
                raise
            return
        finally:
            self._acceptor.close()
        self._sockets = [accepted["data", rank] for rank in ranks]
        links = {rank: accepted["heartbeat", rank] for rank in ranks}
        with closing(FailureDetector(links, self._sockets, self.timeout)) as detector:
            while self._wait_for_operation(detector):
                self._operate(detector)

    def close(self) -> None:
        """Make `serve` end; safe to call twice, and from another thread."""
        self._closed = True
        self._acceptor.interrupt()
        for sock in self._sockets:
            with suppress(OSError):  # the peer may have closed it first
                sock.shutdown(socket.SHUT_RDWR)

    def _wait_for_operation(self, detector: FailureDetector) -> bool:
        """Wait without a deadline until a rank begins an operation; False when all have left."""
        poll = select.poll()
        waiting = {sock.fileno(): rank for rank, sock in enumerate(self._sockets)}
        for sock in self._sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            poll.register(sock, select.POLLIN)
        while waiting:
            for descriptor, _ in poll.poll():
                rank = waiting[descriptor]
                state = _peek(self._sockets[rank])
                if state == "data":
                    return True
                if state == "nothing":
                    continue
                if self._closed:
                    return False
                if not detector.has_left(rank):
                    raise detector.lost(rank, "waiting for an operation", 0.0, "its connection was closed")
                poll.unregister(descriptor)
                del waiting[descriptor]
        return False

    def _operate(self, detector: FailureDetector) -> None:
        operation = self._receive_announcements(detector)
        detector.begin(operation.name)
        order = order_of_ranges(operation.slots, operation.shares) if operation.name != "all-gather" else None
        leaves = len(order.leaves) if order else 1
        if self._buffers.leaves < leaves:
            self._buffers = PipelineBuffers(leaves)
        pipeline = Pipeline(operation.name, operation.bounds, operation.wire, order, self._buffers)
        detector.run(pipeline.streams(self._sockets), operation.name)

    def _receive_announcements(self, detector: FailureDetector) -> Operation:
        """Receive the operation that every rank announces."""
        announced: dict[int, Operation] = {}

        def read(rank: int) -> Generator[memoryview, None, None]:
            payload = yield from read_frame(MAX_ANNOUNCEMENT_BYTES)
            announced[rank] = checked_operation(bytes(payload), self.world_size)

        readers = [MessageReader(sock, rank, read(rank)) for rank, sock in enumerate(self._sockets)]
        detector.run(readers, "an announcement")
        usual, _ = Counter(announced.values()).most_common(1)[0]
        for rank, operation in announced.items():
            if operation != usual:
                raise detector.refuse(rank, f"it announced {operation}, others {usual}", "an announcement")
        return usual


def checked_operation(payload: bytes, world_size: int) -> Operation:
    """Decode an operation; `ProtocolError` if the server cannot serve it."""
    operation = decode(payload)
    if not isinstance(operation, Operation):
        raise ProtocolError(f"{type(operation).__name__} instead of an operation")
    if operation.wire not in KINDS.get(operation.name, ()):
        raise ProtocolError(f"there is no {operation.name!r} of {operation.wire!r}")
    if operation.count > MAX_ELEMENTS:
        raise ProtocolError(f"{operation.count:,} elements are more than {MAX_ELEMENTS:,}")
    parts = 1 if operation.name == "all-reduce" else world_size
    if not are_bounds(operation.bounds, operation.count, parts):
        raise ProtocolError("its bounds do not cut its elements into parts")
    shared_out = 1 <= operation.slots <= MOST_SLOTS and are_bounds(operation.shares, operation.slots, world_size)
    if operation.name != "all-gather" and not shared_out:
        raise ProtocolError("its shares do not cut its slots into parts")
    return operation


def _peek(sock: socket.socket) -> Literal["data", "nothing", "end"]:
    """What can be read from a readable socket; "nothing" if TLS has consumed a message that is not data."""
    try:
        return "data" if sock.recv(1, socket.MSG_PEEK) else "end"
    except BlockingIOError:
        return "nothing"
    except OSError:
        return "end"
