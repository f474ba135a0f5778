"""A worker's connection to a gradient server: messages, one at a time, as long as the server lives.

A server of another implementation sends nothing while it waits for other workers, so its silence is not a failure; the
kernel's keepalive and user timeout detect a host that is gone. An Andon server sends heartbeats, so its silence counts.
"""

import math
import socket
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Final

from andon.protocol2.wire.extension import EXTENDED
from andon.protocol2.worker import detect_dead_host
from andon.transport.keys import SERVER
from andon.transport.tcp.connect import prepare, translate_errors
from andon.transport.tcp.failure_detector import group_error
from andon.transport.tcp.frames import Broken, Buffer, Message, decode
from andon.transport.tcp.stream import MessageReader, Outgoing, Stream, StreamFailed, move_all, read_frame

CONNECT_SECONDS: Final = 30.0
MAX_WAIT_SECONDS: Final = 1e6
"""Longer than any run, and still a number that `poll` takes."""
Move = Callable[[Sequence[Stream], str], None]
"""Moves the streams of an operation, or raises an error of the group."""


class Link:
    """A connection to the server at `address`; `mover` returns a function that moves its streams instead of the
    link."""

    def __init__(self, address: tuple[str, int], mover: Callable[[socket.socket], Move] | None = None) -> None:
        operation = f"connecting to {address[0]}:{address[1]}"
        with translate_errors(SERVER, operation, CONNECT_SECONDS):
            self.socket = prepare(socket.create_connection(address, CONNECT_SECONDS))
            detect_dead_host(self.socket)
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
            found.append(decode((yield from read_frame()), EXTENDED))

        self._move([MessageReader(self.socket, SERVER, read())], operation)
        return found[0]

    def wait_for_end(self, seconds: float) -> None:
        """Stop sending and wait until the server closes the connection, at most `seconds`. Bytes that arrive are
        discarded: closing a connection with unread bytes would reset it, and the last message would be lost."""
        until = time.monotonic() + seconds
        with suppress(OSError):  # it may be closed already, or time is up
            self.socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                self.socket.settimeout(left)
                if not self.socket.recv(1 << 16):
                    break

    def close(self) -> None:
        """Close the connection and wake a thread that waits for it; safe to call twice."""
        with suppress(OSError):  # it may be closed already
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _move_alone(self, streams: Sequence[Stream], operation: str) -> None:
        started = time.monotonic()
        try:
            move_all(streams, min(self.patience, MAX_WAIT_SECONDS))
        except StreamFailed as failed:
            seconds = time.monotonic() - started
            raise group_error(Broken(failed.cause, SERVER, failed.detail), operation, seconds) from failed
