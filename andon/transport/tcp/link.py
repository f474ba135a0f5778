"""A link: one TCP connection to one peer, on which nothing waits for ever.

Messages are frames (see `andon.transport.tcp.frames`): a big-endian u32 length, then that many bytes, of
which the first is the tag. The timeout bounds the time without any progress, so that a large transfer over a
slow network is not mistaken for a stalled peer.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress

from andon.transport.base import GroupTimeout, PeerLost, ProtocolError
from andon.transport.tcp.frames import LENGTH, payload_length

Buffer = bytes | bytearray | memoryview


class Link:
    """A connection to the peer with the given rank (-1: the coordinator)."""

    def __init__(self, sock: socket.socket, peer: int, timeout: float) -> None:
        sock.settimeout(timeout)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.peer, self.timeout = sock, peer, timeout

    @classmethod
    def connect(cls, host: str, port: int, peer: int, timeout: float) -> Link:
        """Connect to a peer that listens at host:port."""
        started = time.monotonic()
        try:
            return cls(socket.create_connection((host, port), timeout), peer, timeout)
        except TimeoutError as error:
            raise GroupTimeout(peer, f"connecting to {host}:{port}", time.monotonic() - started) from error
        except OSError as error:
            raise PeerLost(
                peer, f"connecting to {host}:{port}", time.monotonic() - started, str(error)
            ) from error

    def send(self, data: Buffer, operation: str) -> None:
        """Send all of `data`."""
        started = time.monotonic()
        view = memoryview(data).cast("B")
        try:
            while view:
                view = view[self.socket.send(view) :]
        except TimeoutError as error:
            raise GroupTimeout(self.peer, operation, self.timeout) from error
        except OSError as error:
            raise PeerLost(self.peer, operation, time.monotonic() - started, str(error)) from error

    def receive_into(self, view: memoryview, operation: str) -> None:
        """Fill `view` from the peer."""
        started = time.monotonic()
        view = view.cast("B")
        try:
            while view:
                count = self.socket.recv_into(view)
                if count == 0:
                    raise PeerLost(
                        self.peer, operation, time.monotonic() - started, "the connection was closed"
                    )
                view = view[count:]
        except TimeoutError as error:
            raise GroupTimeout(self.peer, operation, self.timeout) from error
        except OSError as error:
            raise PeerLost(self.peer, operation, time.monotonic() - started, str(error)) from error

    def receive(self, count: int, operation: str) -> bytearray:
        """Receive exactly `count` bytes."""
        data = bytearray(count)
        self.receive_into(memoryview(data), operation)
        return data

    def send_frame(self, payload: Buffer, operation: str) -> None:
        """Send one frame."""
        self.send(LENGTH.pack(len(payload)) + bytes(payload), operation)

    def receive_frame(self, limit: int, operation: str) -> bytearray:
        """Receive one frame of at most `limit` bytes."""
        prefix = self.receive(LENGTH.size, operation)
        try:
            length = payload_length(prefix, limit)
        except ProtocolError as error:
            raise ProtocolError(f"rank {self.peer} sent in {operation}: {error}") from None
        return self.receive(length, operation)

    def close(self) -> None:
        """Close the connection; safe to call twice, and wakes a thread that waits for it."""
        with suppress(OSError):  # it may be closed already
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
