"""A connected worker, as the gradient server sees it: what it is sending, and what it is being sent.

Everything is read as it arrives, so that the end of a connection is seen at once, even behind a large gradient. A
worker may send one gradient while another one of it waits; then it is not read from until that one was taken.

A peer of another implementation never sends a heartbeat and may compute for minutes: the kernel's keepalive and user
timeout find a host that is gone. A worker of ours (`andon.protocol2.wire.extension`) sends heartbeats, so its silence
counts. A frame that has begun must go on in either case, and so must one that it is sent: what a worker that computes
leaves unread waits in the kernel, so only what does not fit there counts, and the mean before it gives it its time.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Final

import numpy as np

from andon.errors import harmless
from andon.protocol2.wire.dialogue import Part, part_of
from andon.protocol2.wire.extension import MARK, Leaving
from andon.protocol2.wire.heads import decode_tail, read_head
from andon.protocol2.wire.messages import Heartbeat, JoinRequest
from andon.transport.tcp.frames import Floats, Message, encode
from andon.transport.tcp.stream import MessageReader, StreamFailed

SLOWEST: Final = 10_000
"""Bytes per second that a frame needs at least, on average."""
MOST_MOVES: Final = 16
"""Reads in a row from one worker: the others have their turn, too."""
LONGEST_NAME: Final = 200
HOST_IS_GONE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}


def notice_dead_host(sock: socket.socket) -> None:
    """Have the kernel end a connection whose host is gone, within a minute; the time that a process takes is nothing to
    it, unless data for that process waits as long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in HOST_IS_GONE.items():
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Gradient:
    """A gradient that is arriving, or has arrived."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.floats: Floats = np.empty(part.count, np.float32)
        self.tail: tuple[Any, ...] = ()
        self.complete = False
        self.accepted = False
        """Whether it may come now."""


class Worker:
    """A worker that has joined. `on_gradient` is called when the head of a gradient is there, and when all of it is."""

    def __init__(
        self,
        worker_id: int,
        join: JoinRequest,
        sock: socket.socket,
        dead_after: float,
        on_gradient: Callable[["Worker", Gradient], None],
    ) -> None:
        self.worker_id, self.sock, self.dead_after = worker_id, sock, dead_after
        self.node_id, self.gpu_count = harmless(join.node_id[:LONGEST_NAME]), join.gpu_count
        self.ours = join.backend.endswith(MARK)
        self.may_leave = not self.ours
        """Whether the end of its connection can be no loss: a worker of ours says first that it leaves."""
        self.backend = harmless(join.backend.removesuffix(MARK)[:LONGEST_NAME])
        self.address: str = sock.getpeername()[0]
        self.gradients: deque[Gradient] = deque()
        self.received = self.sent = 0
        self.heard = time.monotonic()
        self._frame_length, self._frame_until = 0, 0.0
        self._outbox: deque[memoryview] = deque()
        self._outbox_until = 0.0
        self._on_gradient = on_gradient
        self._reader = MessageReader(sock, worker_id, self._read())
        notice_dead_host(sock)

    def __str__(self) -> str:
        return f"worker {self.worker_id} ({self.node_id} at {self.address})"

    @property
    def may_read(self) -> bool:
        """Whether there is room for what it sends."""
        return len(self.gradients) < 2

    @property
    def may_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outbox)

    def read(self) -> None:
        """Receive what has arrived; raises `StreamFailed`."""
        for _ in range(MOST_MOVES):
            if not self.may_read or not self._reader.move():
                break
            self.heard = time.monotonic()
        self._reader.prepare_to_wait()

    def send(self, message: Message) -> None:
        """Send a message, as far as it goes now; `write` sends the rest."""
        parts = [memoryview(part) for part in encode(message) if len(part)]
        self._outbox += parts
        self._outbox_until = max(self._outbox_until, self._until(sum(part.nbytes for part in parts)))
        self.write()

    def write(self) -> None:
        """Send what waits, as far as it goes; raises `StreamFailed`."""
        try:
            while self._outbox:
                count = self.sock.send(self._outbox[0])
                self.sent += count
                self._outbox[0] = self._outbox[0][count:]
                if not self._outbox[0]:
                    self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            while self.may_read and self._reader.move():  # it may have said before that it leaves
                pass
            raise StreamFailed(self._reader, "lost", error.strerror or str(error)) from error

    def beat(self) -> None:
        """Send a heartbeat, unless something else is on its way."""
        if self.ours and not self._outbox:
            self.send(Heartbeat("server", int(time.time() * 1000)))

    def check_silence(self, now: float) -> None:
        """Raise `StreamFailed` if it has been silent for too long, or a frame takes too long in either direction."""
        if self._outbox and now > self._outbox_until:
            raise StreamFailed(self._reader, "stalled", "it reads too slowly")
        if self._frame_length and self.may_read and now > self._frame_until:
            raise StreamFailed(self._reader, "stalled", "it sends a message too slowly")
        if self.ours and self.may_read and now - self.heard > self.dead_after:
            raise StreamFailed(self._reader, "stalled", "it sends no heartbeat")

    def forgive(self, seconds: float) -> None:
        """This process was asleep for so long: what was sent meanwhile is still to be read."""
        self.heard += seconds
        self._frame_until += seconds
        self._outbox_until += seconds

    def take(self) -> Gradient:
        """The gradient that has arrived, which makes room for the next."""
        if not self.may_read:
            self._give_time()
        return self.gradients.popleft()

    def finish(self) -> None:
        """Send nothing any more: it sees the end of the connection after what it was sent."""
        with suppress(OSError):  # it may be gone already
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Disconnect it."""
        self.finish()
        self.sock.close()

    def _read(self) -> Generator[memoryview, None, None]:
        while True:
            head = yield from read_head(self._frame_begins)
            if head.message is Leaving:
                self.may_leave = True
            elif head.message is not Heartbeat:
                gradient = Gradient(part_of(head, self.worker_id))
                self.gradients.append(gradient)
                self._on_gradient(self, gradient)
                yield gradient.floats.view(np.uint8).data
                tail = bytearray(head.tail)
                yield memoryview(tail)
                gradient.tail = decode_tail(head.message, tail) if tail else ()
                gradient.complete = True
                self._on_gradient(self, gradient)
            self.received += self._frame_length
            self._frame_length = 0

    def _frame_begins(self, length: int) -> None:
        self._frame_length = length
        self._give_time()

    def _give_time(self) -> None:
        self.heard = time.monotonic()
        self._frame_until = self._until(self._frame_length)

    def _until(self, length: int) -> float:
        """When a frame of so many bytes that begins now must be through."""
        return time.monotonic() + self.dead_after + length / SLOWEST
