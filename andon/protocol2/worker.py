"""A connected worker, as the gradient server sees it: the gradients that it sends, and the messages that it receives.

Bytes are read as they arrive, so that the end of a connection is noticed at once, even behind a large gradient. A
worker may send a second gradient while the first one waits; then it is not read from until the first was taken.

A worker of another implementation never sends a heartbeat and may compute for minutes: the kernel's keepalive and user
timeout detect a host that is gone. An Andon worker (`andon.protocol2.wire.extension`) sends heartbeats, so its silence
counts. In either case a frame that has begun must make progress, in both directions. A worker that computes does not
read; its messages wait in the kernel. Only bytes that do not fit there have a deadline. A short message does not
shorten the deadline of the mean before it.
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

MIN_BYTES_PER_SECOND: Final = 10_000
"""The average rate that a frame needs."""
MAX_READS: Final = 16
"""Reads in a row from one worker, before the others are served."""
MAX_NAME_LENGTH: Final = 200
KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}


def detect_dead_host(sock: socket.socket) -> None:
    """Have the kernel end a connection whose host is gone, within a minute. A slow process does not count as gone,
    unless data for it waits that long."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
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
        """Whether the dialogue allows it now."""


class Worker:
    """A worker that has joined. `on_gradient` is called when the head of a gradient has arrived, and at its end."""

    def __init__(
        self,
        worker_id: int,
        join: JoinRequest,
        sock: socket.socket,
        dead_after: float,
        on_gradient: Callable[["Worker", Gradient], None],
    ) -> None:
        self.worker_id, self.sock, self.dead_after = worker_id, sock, dead_after
        self.node_id, self.gpu_count = harmless(join.node_id[:MAX_NAME_LENGTH]), join.gpu_count
        self.is_andon = join.backend.endswith(MARK)
        self.may_leave = not self.is_andon
        """Whether it may close its connection without being lost: an Andon worker sends `Leaving` first."""
        self.backend = harmless(join.backend.removesuffix(MARK)[:MAX_NAME_LENGTH])
        self.address: str = sock.getpeername()[0]
        self.gradients: deque[Gradient] = deque()
        self.received = self.sent = 0
        self.last_seen = time.monotonic()
        self._frame_length, self._frame_until = 0, 0.0
        self._outbox: deque[memoryview] = deque()
        self._outbox_until = 0.0
        self._on_gradient = on_gradient
        self._reader = MessageReader(sock, worker_id, self._read())
        detect_dead_host(sock)

    def __str__(self) -> str:
        return f"worker {self.worker_id} ({self.node_id} at {self.address})"

    @property
    def may_read(self) -> bool:
        """Whether there is memory for what it sends."""
        return len(self.gradients) < 2

    @property
    def may_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._outbox)

    def read(self) -> None:
        """Receive what has arrived; raises `StreamFailed`."""
        for _ in range(MAX_READS):
            if not self.may_read or not self._reader.move():
                break
            self.last_seen = time.monotonic()
        self._reader.prepare_to_wait()

    def send(self, message: Message) -> None:
        """Send as much of a message as possible now; `write` sends the rest."""
        parts = [memoryview(part) for part in encode(message) if len(part)]
        self._outbox += parts
        self._outbox_until = max(self._outbox_until, self._deadline(sum(part.nbytes for part in parts)))
        self.write()

    def write(self) -> None:
        """Send as much as possible of the waiting messages; raises `StreamFailed`."""
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
            while self.may_read and self._reader.move():  # `Leaving` may have arrived before
                pass
            raise StreamFailed(self._reader, "lost", error.strerror or str(error)) from error

    def beat(self) -> None:
        """Send a heartbeat, unless another message is being sent."""
        if self.is_andon and not self._outbox:
            self.send(Heartbeat("server", int(time.time() * 1000)))

    def check_silence(self, now: float) -> None:
        """Raise `StreamFailed` if it has been silent for too long, or a frame takes too long in either direction."""
        if self._outbox and now > self._outbox_until:
            raise StreamFailed(self._reader, "stalled", "it reads too slowly")
        if self._frame_length and self.may_read and now > self._frame_until:
            raise StreamFailed(self._reader, "stalled", "it sends a message too slowly")
        if self.is_andon and self.may_read and now - self.last_seen > self.dead_after:
            raise StreamFailed(self._reader, "stalled", "it sends no heartbeat")

    def extend_deadlines(self, seconds: float) -> None:
        """Give the worker the time that this process was asleep: what it sent meanwhile has not been read yet."""
        self.last_seen += seconds
        self._frame_until += seconds
        self._outbox_until += seconds

    def take(self) -> Gradient:
        """Take the gradient that has arrived, so that the next one can be read."""
        if not self.may_read:
            self._restart_deadline()
        return self.gradients.popleft()

    def finish(self) -> None:
        """Send no more: the worker reads the end of the connection after the last message."""
        with suppress(OSError):  # it may be gone already
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
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
        self._restart_deadline()

    def _restart_deadline(self) -> None:
        self.last_seen = time.monotonic()
        self._frame_until = self._deadline(self._frame_length)

    def _deadline(self, length: int) -> float:
        """When a frame of `length` bytes that begins now must have been sent."""
        return time.monotonic() + self.dead_after + length / MIN_BYTES_PER_SECOND
