"""A blocking connection for messages, with a deadline for progress."""

import socket
from contextlib import suppress
from typing import Self

from andon.transport.base import ProtocolError, peer_name
from andon.transport.tcp.connect import translate_errors
from andon.transport.tcp.frames import LENGTH, Buffer, payload_length


class Link:
    """A blocking connection to the peer with the given rank (-1: a server).

    The timeout bounds the time without any progress, so that a large transfer over a slow network does not count as a
    stalled peer."""

    def __init__(self, sock: socket.socket, peer: int, timeout: float) -> None:
        sock.settimeout(timeout)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.peer, self.timeout = sock, peer, timeout

    @classmethod
    def connect(cls, host: str, port: int, peer: int, timeout: float) -> Self:
        """Connect to a peer that listens at host:port."""
        with translate_errors(peer, f"connecting to {host}:{port}", timeout):
            return cls(socket.create_connection((host, port), timeout), peer, timeout)

    def send(self, data: Buffer, operation: str) -> None:
        """Send all of `data`."""
        view = memoryview(data).cast("B")
        with translate_errors(self.peer, operation, self.timeout):
            while view:
                view = view[self.socket.send(view) :]

    def receive(self, count: int, operation: str) -> bytearray:
        """Receive exactly `count` bytes."""
        data = bytearray(count)
        view = memoryview(data)
        with translate_errors(self.peer, operation, self.timeout):
            while view:
                received = self.socket.recv_into(view)
                if received == 0:
                    raise ConnectionError("the connection was closed")
                view = view[received:]
        return data

    def receive_frame(self, limit: int, operation: str) -> bytearray:
        """Receive one frame of at most `limit` bytes; its payload."""
        prefix = self.receive(LENGTH.size, operation)
        try:
            length = payload_length(prefix, limit)
        except ProtocolError as error:
            raise ProtocolError(f"{peer_name(self.peer)} sent in {operation}: {error}") from None
        return self.receive(length, operation)

    def close(self) -> None:
        """Close the connection; safe to call twice, and wakes a thread that waits for it."""
        with suppress(OSError):  # it may be closed already
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
