"""Streams: bytes that are sent and received at the same time, each stream at its own pace.

A *stream* moves a fixed number of *pieces* through one socket, in order. A piece is moved when it is *ready*: an
outgoing piece once its bytes are complete, an incoming one once there is a buffer for it. `move_all` moves every piece
that can move and sleeps only when no stream can continue, so that no rank blocks in a write to a peer that blocks in a
write.
"""

import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Final, Literal

from andon.transport.base import ProtocolError
from andon.transport.tcp.frames import LENGTH, MAX_FRAME_BYTES, payload_length

Cause = Literal["lost", "stalled", "protocol"]
"""How a peer failed: it is gone, it makes no progress, or it broke the protocol."""
TRIES: Final = 10
"""How often to yield the core and try again before sleeping: the next piece often arrives within microseconds."""
LOW_WATER_BYTES: Final = 1 << 19
"""Wake up for no fewer bytes than these, unless fewer are missing: waking up is half of the cost of a small piece."""


class Stream(ABC):
    """Pieces through one socket to or from a peer. When it is the turn of piece i, `piece(i)` gives its bytes or the
    buffer for it; `moved(i)` is called when it has moved."""

    event: int

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        count: int,
        piece: Callable[[int], memoryview],
        moved: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.sock, self.peer, self.count = sock, peer, count
        self.ready, self.done = count, 0  # how many pieces may move, and how many have moved
        self._piece, self._moved = piece, moved
        self._rest: memoryview | None = None

    def move(self) -> bool:
        """Move as much of the next piece as possible without blocking; returns whether anything was moved."""
        rest = self._piece(self.done) if self._rest is None else self._rest
        try:
            count = self._transfer(rest) if rest else 0
        except BlockingIOError:
            self._rest = rest
            return False
        except OSError as error:
            raise StreamFailed(self, "lost", str(error)) from error
        if count < len(rest):
            if count == 0:
                raise StreamFailed(self, "lost", "the connection was closed")
            self._rest = rest[count:]
        else:
            self._rest = None
            self.done += 1
            self._moved(self.done - 1)
        return True

    def prepare_to_wait(self) -> None:  # noqa: B027 (most streams have nothing to prepare)
        """Called before sleeping until the peer lets this stream continue."""

    @abstractmethod
    def _transfer(self, data: memoryview) -> int:
        """Send or receive without blocking; returns the number of bytes."""


class StreamFailed(Exception):
    """A stream cannot continue: the connection was lost, the peer stalled, or it broke the protocol."""

    def __init__(self, stream: Stream, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.stream, self.cause, self.detail = stream, cause, detail


class Outgoing(Stream):
    """Pieces to send."""

    event = select.POLLOUT

    def _transfer(self, data: memoryview) -> int:
        return self.sock.send(data, socket.MSG_MORE if self.done + 1 < self.ready else 0)


class Incoming(Stream):
    """Pieces to receive."""

    event = select.POLLIN

    def prepare_to_wait(self) -> None:
        missing = len(self._rest) if self._rest else 1
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(LOW_WATER_BYTES, missing))

    def _transfer(self, data: memoryview) -> int:
        return self.sock.recv_into(data)


class MessageReader(Incoming):
    """An incoming stream that is read by a generator, which yields the buffer for the next bytes, returns when it has
    read enough, and raises `ProtocolError` for bytes that it does not accept."""

    def __init__(self, sock: socket.socket, peer: int, buffers: Iterator[memoryview]) -> None:
        super().__init__(sock, peer, 1, lambda index: self._next, self._filled)
        self._buffers, self._next = buffers, next(buffers)

    def _filled(self, index: int) -> None:
        try:
            self._next = next(self._buffers)
            self.count += 1
            self.ready += 1
        except StopIteration:
            pass
        except ProtocolError as error:
            raise StreamFailed(self, "protocol", str(error)) from error


def read_frame(limit: int = MAX_FRAME_BYTES) -> Generator[memoryview, None, bytearray]:
    """For a `MessageReader`: reads one frame of at most `limit` bytes and returns its payload."""
    prefix = bytearray(LENGTH.size)
    yield memoryview(prefix)
    payload = bytearray(payload_length(prefix, limit))
    yield memoryview(payload)
    return payload


def move_all(streams: Sequence[Stream], timeout: float) -> None:
    """Move all pieces of all streams; no stream may wait for its peer longer than `timeout`."""
    poll = select.poll()
    waiting: dict[Stream, float] = {}
    tries = 0
    while any(stream.done < stream.count for stream in streams):
        moved = False
        for stream in streams:
            if stream.done == stream.ready:
                waiting.pop(stream, None)
            elif stream.move():
                waiting.pop(stream, None)
                moved = True
            elif stream not in waiting:
                waiting[stream] = time.monotonic()
        if moved:
            tries = 0
        elif tries < TRIES:
            tries += 1
            os.sched_yield()
        else:
            _sleep(poll, waiting, timeout)


def _sleep(poll: select.poll, waiting: Mapping[Stream, float], timeout: float) -> None:
    events: dict[int, int] = {}
    for stream in waiting:
        stream.prepare_to_wait()
        events[stream.sock.fileno()] = events.get(stream.sock.fileno(), 0) | stream.event
    for descriptor, mask in events.items():
        poll.register(descriptor, mask)
    longest = min(waiting, key=waiting.__getitem__)
    left = waiting[longest] + timeout - time.monotonic()
    if not poll.poll(max(0.0, left) * 1000) and waiting[longest] + timeout <= time.monotonic():
        raise StreamFailed(longest, "stalled", "")
    for descriptor in events:
        poll.unregister(descriptor)
