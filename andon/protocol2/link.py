"""A worker's connection to a gradient server: messages, one at a time, for as long as the server lives.

A server of another implementation sends nothing while it waits for other workers, so silence means nothing; the
kernel's keepalive and user timeout find a host that is gone. An Andon server sends heartbeats, so its silence counts.
"""

import math
import select
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Final

from andon.protocol2.wire.extension import EXTENDED
from andon.protocol2.worker import notice_dead_host
from andon.transport.base import GroupError, GroupTimeout, PeerLost, ProtocolError
from andon.transport.keys import SERVER
from andon.transport.tcp.connect import prepare, translate_errors
from andon.transport.tcp.frames import MAX_FRAME, Buffer, Message, decode
from andon.transport.tcp.stream import MessageReader, Outgoing, Stream, StreamFailed, move_all, read_frame

CONNECT_SECONDS: Final = 30.0
LONGEST_WAIT: Final = 1e6
"""Seconds: longer than any run, and still a number for `poll`."""
Move = Callable[[Sequence[Stream], str], None]
"""Moves the streams of an operation, or raises an error of the group."""


class Link:
    """A connection to the server at `address`; `mover` gives what moves its streams, if it is not the link itself."""

    def __init__(self, address: tuple[str, int], mover: Callable[[socket.socket], Move] | None = None) -> None:
        operation = f"connecting to {address[0]}:{address[1]}"
        with translate_errors(SERVER, operation, CONNECT_SECONDS):
            self.socket = prepare(socket.create_connection(address, CONNECT_SECONDS))
            notice_dead_host(self.socket)
        self.patience = math.inf
        """Seconds without any progress after which the server counts as stalled."""
        self._move = mover(self.socket) if mover else self._move_alone

    def send(self, buffers: Sequence[Buffer], operation: str) -> None:
        """Send the buffers of a message."""
        pieces = [memoryview(buffer) for buffer in buffers if len(buffer)]
        self._move([Outgoing(self.socket, SERVER, len(pieces), pieces.__getitem__)], operation)

    def receive(self, operation: str) -> Message:
        """Receive a message."""
        found: list[Message] = []

        def read() -> Generator[memoryview, None, None]:
            found.append(decode((yield from read_frame(MAX_FRAME)), EXTENDED))

        self._move([MessageReader(self.socket, SERVER, read())], operation)
        return found[0]

    def wait_for_end(self, seconds: float) -> None:
        """Send nothing any more, and wait for the server to close, for so long at most. What arrives is read and
        dropped: to close a connection on it would take back what was sent last."""
        until = time.monotonic() + seconds
        with suppress(OSError):  # it may be closed already
            self.socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0 and select.select([self.socket], [], [], left)[0]:
                if not self.socket.recv(1 << 16):
                    break

    def close(self) -> None:
        """Close the connection; safe to call twice, and wakes a thread that waits for it."""
        with suppress(OSError):  # it may be closed already
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _move_alone(self, streams: Sequence[Stream], operation: str) -> None:
        started = time.monotonic()
        try:
            move_all(streams, min(self.patience, LONGEST_WAIT))
        except StreamFailed as failed:
            raise _error(failed, operation, time.monotonic() - started) from failed


def _error(failed: StreamFailed, operation: str, seconds: float) -> GroupError:
    if failed.cause == "lost":
        return PeerLost(SERVER, operation, seconds, failed.detail)
    if failed.cause == "stalled":
        return GroupTimeout(SERVER, operation, seconds)
    return ProtocolError(f"the gradient server broke the protocol in {operation}: {failed.detail}")
