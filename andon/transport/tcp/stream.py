"""Flows: bytes that leave and arrive at the same time, each at its own pace.

A *flow* moves a fixed number of *pieces* through one socket, in order. A piece is moved when it is *ready*:
an outgoing piece once its bytes are there to be sent, an incoming one once there is room for it. `run` moves
whatever can be moved and sleeps only when no flow can go on, so that nobody ever waits in a write for a peer
that waits in a write.
"""

from __future__ import annotations

import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Final

from andon.transport.base import ProtocolError
from andon.transport.tcp.frames import LENGTH, payload_length

TRIES: Final = 10
"""How often to let others run and try again before sleeping: the next piece is often a moment away."""
LOW_WATER: Final = 1 << 19
"""Wake up for no fewer bytes than these, unless fewer are missing: half of the cost of a small piece is the
waking."""


class FlowFailed(Exception):
    """A flow cannot go on."""

    def __init__(self, flow: Flow, detail: str) -> None:
        super().__init__(detail)
        self.flow, self.detail = flow, detail


class FlowBroken(FlowFailed):
    """The connection failed or was closed."""


class FlowStalled(FlowFailed):
    """The peer has let the flow wait for too long."""


class FlowRefused(FlowFailed):
    """The peer said something that the protocol does not allow."""


class Flow(ABC):
    """Pieces through one socket: `piece(i)` gives the bytes of piece i, or the room for it, when its turn has
    come, and `moved(i)` is told when it has moved. `peer` is the rank at the other end."""

    event: int

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        piece: Callable[[int], memoryview],
        moved: Callable[[int], None],
        count: int,
    ) -> None:
        self.sock, self.peer, self.count = sock, peer, count
        self.ready = count
        self.done = 0
        self._piece, self._moved = piece, moved
        self._rest: memoryview | None = None

    @property
    def waits(self) -> bool:
        """Whether the next piece is ready and waits for the peer."""
        return self.done < self.ready and self.done < self.count

    def move(self) -> bool:
        """Move what can be moved of the next piece without waiting; whether anything was."""
        rest = self._piece(self.done) if self._rest is None else self._rest
        try:
            count = self._transfer(rest) if rest else 0
        except BlockingIOError:
            self._rest = rest
            return False
        except OSError as error:
            raise FlowBroken(self, str(error)) from error
        if count < len(rest):
            if count == 0:
                raise FlowBroken(self, "the connection was closed")
            self._rest = rest[count:]
        else:
            self._rest = None
            self.done += 1
            self._moved(self.done - 1)
        return True

    def prepare_to_wait(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Called before sleeping until the peer lets this flow go on."""

    @abstractmethod
    def _transfer(self, data: memoryview) -> int:
        """Hand bytes to the system, or take them from it; how many."""


class Outgoing(Flow):
    """Pieces to send."""

    event = select.POLLOUT

    def _transfer(self, data: memoryview) -> int:
        more = self.done + 1 < self.ready and self.done + 1 < self.count
        return self.sock.send(data, socket.MSG_MORE if more else 0)


class Incoming(Flow):
    """Pieces to receive."""

    event = select.POLLIN

    def prepare_to_wait(self) -> None:
        missing = len(self._rest) if self._rest else 1
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(LOW_WATER, missing))

    def _transfer(self, data: memoryview) -> int:
        return self.sock.recv_into(data)


class Listening(Incoming):
    """An incoming flow that follows a script: a generator that yields the room for what it hears next,
    ends when it has heard enough, and raises `ProtocolError` at what it does not accept."""

    def __init__(self, sock: socket.socket, peer: int, script: Iterator[memoryview]) -> None:
        super().__init__(sock, peer, self._room, self._heard, 1)
        self._script = script
        self._next = next(script)

    def _room(self, index: int) -> memoryview:
        return self._next

    def _heard(self, index: int) -> None:
        try:
            self._next = next(self._script)
            self.count += 1
            self.ready += 1
        except StopIteration:
            pass
        except ProtocolError as error:
            raise FlowRefused(self, str(error)) from error


def read_frame(limit: int) -> Generator[memoryview, None, bytearray]:
    """A script that reads one frame of at most `limit` bytes and returns its payload."""
    prefix = bytearray(LENGTH.size)
    yield memoryview(prefix)
    payload = bytearray(payload_length(prefix, limit))
    yield memoryview(payload)
    return payload


def nothing(index: int) -> None:
    """For a flow of which nobody needs to know what has moved."""


def run(flows: Sequence[Flow], timeout: float) -> None:
    """Move all pieces of all flows; no flow may wait for its peer longer than `timeout`."""
    poll = select.poll()
    waiting: dict[Flow, float] = {}
    tries = 0
    while any(flow.done < flow.count for flow in flows):
        moved = False
        for flow in flows:
            if not flow.waits:
                waiting.pop(flow, None)
            elif flow.move():
                waiting.pop(flow, None)
                moved = True
            elif flow not in waiting:
                waiting[flow] = time.monotonic()
        if moved:
            tries = 0
        elif tries < TRIES:
            tries += 1
            os.sched_yield()
        else:
            _sleep(poll, waiting, timeout)


def _sleep(poll: select.poll, waiting: Mapping[Flow, float], timeout: float) -> None:
    events: dict[int, int] = {}
    for flow in waiting:
        flow.prepare_to_wait()
        events[flow.sock.fileno()] = events.get(flow.sock.fileno(), 0) | flow.event
    for descriptor, mask in events.items():
        poll.register(descriptor, mask)
    longest = min(waiting, key=waiting.__getitem__)
    left = waiting[longest] + timeout - time.monotonic()
    if not poll.poll(max(0.0, left) * 1000) and waiting[longest] + timeout <= time.monotonic():
        raise FlowStalled(longest, "no progress")
    for descriptor in events:
        poll.unregister(descriptor)
