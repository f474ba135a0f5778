"""All connections of a gradient server, moved by one thread: who knocks, who has joined, who is gone.

Protocol 2 knows no authentication. So only this machine may connect, and the networks that the server's user allows; a
connection that has not joined has the limits and the deadline of `andon.transport.tcp.entrance.reception`.
"""

import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final, Literal

from andon.protocol2.wire.extension import WorkerLost
from andon.protocol2.wire.messages import VERSION_2, JoinRequest
from andon.protocol2.worker import Gradient, Worker
from andon.transport.base import GroupError, ProtocolError
from andon.transport.tcp.connect import listen, prepare
from andon.transport.tcp.entrance.reception import Reception
from andon.transport.tcp.frames import Message, decode
from andon.transport.tcp.stream import StreamFailed, read_frame

Network = IPv4Network | IPv6Network
TURN: Final = 0.1
"""Seconds after which the clocks are looked at, if nothing else wakes the thread."""
LONGEST_JOIN: Final = 1 << 12
Cause = Literal["lost", "stalled", "protocol"]
HAPPENED: Final = {"lost": "was lost", "stalled": "stalled", "protocol": "broke the protocol"}


class WorkerGone(GroupError):
    """A worker disconnected, stalled or broke the protocol, and was dropped."""

    def __init__(self, worker: Worker, cause: Cause, operation: str, detail: str) -> None:
        super().__init__(f"{worker} {HAPPENED[cause]} while {operation}: {detail}")
        self.worker, self.cause, self.operation, self.detail = worker, cause, operation, detail


class Connections:
    """The listener and the workers of a server. `on_gradient` hears of gradients, `on_lost` of lost workers."""

    def __init__(
        self,
        bind: tuple[str, int],
        allow: Sequence[Network],
        times: tuple[float, float],
        on_gradient: Callable[[Worker, Gradient], None],
        on_lost: Callable[["WorkerGone"], None],
    ) -> None:
        self._listener = listen(bind, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._allow, (self._dead_after, self._heartbeat) = allow, times
        self._on_gradient, self._on_lost = on_gradient, on_lost
        self._workers: dict[int, Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._reception: Reception[JoinRequest] | None = None
        self._last_turn = self._next_beat = time.monotonic()
        self.interrupt: Callable[[], None] = _nothing
        """Called about ten times a second; what it raises ends what the server does."""
        self.operation = "joining"
        """What the server does, as errors name it."""

    @property
    def workers(self) -> list[Worker]:
        """The workers that have joined and are connected, in the order of their ids."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    def open_door(self, say: Callable[[str], None]) -> None:
        """Begin to accept connections."""
        self._reception = Reception(self._listener, self._selector, self._greet, None, say)

    def close_door(self) -> None:
        """Stop listening: nobody else can join."""
        if self._reception:
            self._reception.close()
        self._reception = None
        self._listener.close()

    def free_id(self) -> int:
        """The lowest id that no worker has."""
        return next(number for number in range(len(self._workers) + 1) if number not in self._workers)

    def admit(self, sock: socket.socket, join: JoinRequest) -> Worker | None:
        """Make a connection a worker, unless it has gone again."""
        try:
            worker = Worker(self.free_id(), join, prepare(sock), self._dead_after, self._on_gradient)
        except OSError:
            sock.close()
            return None
        self._workers[worker.worker_id] = worker
        self._selector.register(sock, selectors.EVENT_READ, worker)
        return worker

    def send(self, worker: Worker, message: Message) -> None:
        """Send a worker a message, as far as it goes now."""
        with self.dropping(worker):
            worker.send(message)

    def flush(self, seconds: float) -> None:
        """Go on until everything was sent, for so many seconds at most."""
        until = time.monotonic() + seconds
        while any(worker.may_write for worker in self._workers.values()) and time.monotonic() < until:
            self.turn()

    def turn(self) -> list[tuple[socket.socket, JoinRequest]]:
        """Move what can be moved, or wait a moment; the connections that want to join."""
        self.interrupt()
        for worker in self._workers.values():
            self._watch(worker)
        arrivals = []
        for key, mask in self._selector.select(TURN):
            if isinstance(key.data, Worker):
                with self.dropping(key.data):
                    if mask & selectors.EVENT_WRITE:
                        key.data.write()
                    if mask & selectors.EVENT_READ:
                        key.data.read()
            elif self._reception and (arrival := self._reception.handle(key.data)):
                arrivals.append(arrival)
        if time.monotonic() - self._last_turn >= TURN:
            self._look_at_clocks(time.monotonic())
        return arrivals

    def drop(self, worker: Worker, cause: Cause, detail: str) -> None:
        """Disconnect a worker, and say so at once."""
        if self._workers.get(worker.worker_id) is not worker:  # its id may be another's by now
            return
        del self._workers[worker.worker_id]
        error = WorkerGone(worker, cause, self.operation, detail)
        if worker.sock in self._selector.get_map():
            self._selector.unregister(worker.sock)
        worker.close()
        self._on_lost(error)
        for other in self.workers:
            if other.ours:
                self.send(other, WorkerLost(worker.worker_id, str(error)))

    @contextmanager
    def dropping(self, worker: Worker) -> Iterator[None]:
        """A context in which a worker whose connection fails, or that breaks the protocol, is dropped."""
        try:
            yield
        except StreamFailed as failed:
            self.drop(worker, failed.cause, failed.detail)
        except ProtocolError as error:
            self.drop(worker, "protocol", str(error))

    def close(self) -> None:
        """Disconnect everyone and stop listening; safe to call twice."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self.close_door()
        self._selector.close()

    def _greet(self, sock: socket.socket) -> Generator[memoryview, None, JoinRequest]:
        check_allowed(sock.getpeername()[0], self._allow)
        request = decode((yield from read_frame(LONGEST_JOIN)), VERSION_2)
        if not isinstance(request, JoinRequest):
            raise ProtocolError(f"{type(request).__name__} where JoinRequest was expected")
        return request

    def _watch(self, worker: Worker) -> None:
        """Have the selector look for what a worker waits for."""
        events = selectors.EVENT_READ * worker.may_read | selectors.EVENT_WRITE * worker.may_write
        watched = worker.sock in self._selector.get_map()
        if not events and watched:
            self._selector.unregister(worker.sock)
        elif events and not watched:
            self._selector.register(worker.sock, events, worker)
        elif events and self._selector.get_key(worker.sock).events != events:
            self._selector.modify(worker.sock, events, worker)

    def _look_at_clocks(self, now: float) -> None:
        asleep, self._last_turn = now - self._last_turn, now
        beat = now >= self._next_beat
        for worker in self.workers:
            if asleep > 1.0:
                worker.forgive(asleep)
            with self.dropping(worker):
                worker.check_silence(now)
                if beat:
                    worker.beat()
        if beat:
            self._next_beat = now + self._heartbeat
        if self._reception:
            self._reception.tick()


def _nothing() -> None:
    pass


def is_allowed(host: str, allow: Sequence[Network]) -> bool:
    """Whether a host may connect: this machine, and whoever is in an allowed network."""
    address = ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    return address.is_loopback or any(address in network for network in allow)


def check_allowed(host: str, allow: Sequence[Network]) -> None:
    """Refuse a host that may not connect."""
    if not is_allowed(host, allow):
        raise ProtocolError("it is in no network that --allow names")
