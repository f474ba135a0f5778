"""All connections of a gradient server, served by one thread: new ones, workers that have joined, and lost ones.

Protocol 2 has no authentication. So only this machine may connect, and the networks that the server's user allows. A
connection that has not joined has the limits and the deadline of `andon.transport.tcp.entrance.reception`.
"""

import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final

from andon.protocol2.wire.extension import WorkerLost
from andon.protocol2.wire.messages import VERSION_2, JoinRequest
from andon.protocol2.worker import Gradient, Worker
from andon.transport.base import GroupError, ProtocolError
from andon.transport.tcp.connect import listen, prepare
from andon.transport.tcp.entrance.reception import Reception
from andon.transport.tcp.frames import Message, decode
from andon.transport.tcp.stream import Cause, StreamFailed, read_frame

Network = IPv4Network | IPv6Network
POLL_SECONDS: Final = 0.1
"""How often deadlines are checked, if nothing else wakes the thread."""
MAX_JOIN_BYTES: Final = 1 << 12
CAUSES: Final = {"lost": "was lost", "stalled": "stalled", "protocol": "broke the protocol"}


class WorkerGone(GroupError):
    """A worker disconnected, stalled or broke the protocol, and was dropped."""

    def __init__(self, worker: Worker, cause: Cause, operation: str, detail: str) -> None:
        super().__init__(f"{worker} {CAUSES[cause]} while {operation}: {detail}")
        self.worker, self.cause, self.operation, self.detail = worker, cause, operation, detail


class Connections:
    """The listener and the workers of a server. It calls `on_gradient` for gradients and `on_lost` for lost workers.

    `times` are the seconds after which a silent Andon worker is dead, and between two heartbeats."""

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
        self._last_check = self._next_beat = time.monotonic()
        self.interrupt: Callable[[], None] = lambda: None
        """Called about ten times a second; an exception that it raises ends the current operation."""
        self.operation = "joining"
        """How errors name the current operation."""

    @property
    def workers(self) -> list[Worker]:
        """The workers that have joined and are connected, in the order of their ids."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    def start_accepting(self, report: Callable[[str], None]) -> None:
        """Begin to accept connections; `report` is called with a line about one that was refused."""
        self._reception = Reception(self._listener, self._selector, self._greet, None, report)

    def stop_accepting(self) -> None:
        """Stop listening: no other worker can join."""
        if self._reception:
            self._reception.close()
        self._reception = None
        self._listener.close()

    def free_id(self) -> int:
        """The lowest id that no worker has."""
        return next(number for number in range(len(self._workers) + 1) if number not in self._workers)

    def admit(self, sock: socket.socket, join: JoinRequest) -> Worker | None:
        """Make a connection a worker, unless it has been closed again."""
        try:
            worker = Worker(self.free_id(), join, prepare(sock), self._dead_after, self._on_gradient)
        except OSError:
            sock.close()
            return None
        self._workers[worker.worker_id] = worker
        self._selector.register(sock, selectors.EVENT_READ, worker)
        return worker

    def send(self, worker: Worker, message: Message) -> None:
        """Send a worker as much of a message as possible now."""
        with self.dropping(worker):
            worker.send(message)

    def flush(self, seconds: float) -> None:
        """Serve until all messages are sent, at most `seconds`."""
        until = time.monotonic() + seconds
        while any(worker.may_write for worker in self._workers.values()) and time.monotonic() < until:
            self.run_once()

    def run_once(self) -> list[tuple[socket.socket, JoinRequest]]:
        """Read and write what is ready, or wait a moment; returns the connections that want to join."""
        self.interrupt()
        for worker in self._workers.values():
            self._watch(worker)
        joining = []
        for key, mask in self._selector.select(POLL_SECONDS):
            if isinstance(key.data, Worker):
                with self.dropping(key.data):
                    if mask & selectors.EVENT_WRITE:
                        key.data.write()
                    if mask & selectors.EVENT_READ:
                        key.data.read()
            elif self._reception and (connection := self._reception.handle(key.data)):
                joining.append(connection)
        if time.monotonic() - self._last_check >= POLL_SECONDS:
            self._check_deadlines(time.monotonic())
        return joining

    def drop(self, worker: Worker, cause: Cause, detail: str) -> None:
        """Disconnect a worker, and report it at once."""
        if self._workers.get(worker.worker_id) is not worker:  # another worker may have its id by now
            return
        del self._workers[worker.worker_id]
        error = WorkerGone(worker, cause, self.operation, detail)
        if worker.sock in self._selector.get_map():
            self._selector.unregister(worker.sock)
        worker.close()
        self._on_lost(error)
        for other in self.workers:
            if other.is_andon:
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
        """Disconnect all workers and stop listening; safe to call twice."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self.stop_accepting()
        self._selector.close()

    def _greet(self, sock: socket.socket) -> Generator[memoryview, None, JoinRequest]:
        if not is_allowed(sock.getpeername()[0], self._allow):
            raise ProtocolError("it is in no network that --allow names")
        request = decode((yield from read_frame(MAX_JOIN_BYTES)), VERSION_2)
        if not isinstance(request, JoinRequest):
            raise ProtocolError(f"{type(request).__name__} where JoinRequest was expected")
        return request

    def _watch(self, worker: Worker) -> None:
        """Have the selector watch for the events that a worker waits for."""
        events = selectors.EVENT_READ * worker.may_read | selectors.EVENT_WRITE * worker.may_write
        watched = worker.sock in self._selector.get_map()
        if not events and watched:
            self._selector.unregister(worker.sock)
        elif events and not watched:
            self._selector.register(worker.sock, events, worker)
        elif events and self._selector.get_key(worker.sock).events != events:
            self._selector.modify(worker.sock, events, worker)

    def _check_deadlines(self, now: float) -> None:
        asleep, self._last_check = now - self._last_check, now
        beat = now >= self._next_beat
        for worker in self.workers:
            if asleep > 1.0:
                worker.extend_deadlines(asleep)
            with self.dropping(worker):
                worker.check_silence(now)
                if beat:
                    worker.beat()
        if beat:
            self._next_beat = now + self._heartbeat
        if self._reception:
            self._reception.tick()


def is_allowed(host: str, allow: Sequence[Network]) -> bool:
    """Whether a host may connect: this machine, or a host of an allowed network."""
    address = ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or any(address in network for network in allow)
