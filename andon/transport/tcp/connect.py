"""Connections: how ranks connect to each other, and a blocking connection for messages.

A rank that waits for peers opens an acceptor and gives them its address and a token. A peer that connects sends a
hello: its rank, the connection's *channel* (what it is for) and the token. A connection that says anything else is
closed, and does not hold up the others.
"""

import hmac
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from ipaddress import ip_address
from typing import Final, Self, TypeVar

from andon.transport.base import GroupTimeout, PeerLost, ProtocolError
from andon.transport.tcp.frames import LENGTH, Buffer, Hello, decode, frame, payload_length
from andon.transport.tcp.stream import MessageReader, StreamFailed, read_frame

LONGEST_HELLO: Final = 1 << 10
T = TypeVar("T")
Channel = tuple[str, int]
"""What a connection is for, and the rank at its other end."""

log = logging.getLogger(__name__)


class Acceptor:
    """Listens at host:port (0: any free port) for the peers of a group of `world_size`."""

    def __init__(self, host: str, port: int, world_size: int, token: str | None = None) -> None:
        self._listener = listen((host, port), backlog=2 * world_size + 8)
        self.world_size = world_size
        self.token = secrets.token_hex(16) if token is None else token
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def accept(self, expected: set[Channel], timeout: float) -> dict[Channel, socket.socket]:
        """Wait for all expected connections."""
        accepted: dict[Channel, socket.socket] = {}
        with ExitStack() as undo, closing(introductions(self._listener, self._read_hello, timeout)) as arrivals:
            while missing := expected - accepted.keys():
                sock, hello = next(arrivals, (None, None))
                if sock is None or hello is None:
                    channel, rank = min(missing, key=lambda each: each[1])
                    raise GroupTimeout(rank, f"joining ({channel})", timeout, "it did not connect")
                if (hello.channel, hello.rank) in missing:
                    accepted[hello.channel, hello.rank] = undo.enter_context(sock)
                else:
                    log.warning("closed an unexpected connection of rank %d (%s)", hello.rank, hello.channel)
                    sock.close()
            undo.pop_all()
        return accepted

    def _read_hello(self) -> Generator[memoryview, None, Hello]:
        hello = decode((yield from read_frame(LONGEST_HELLO)))
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            raise ProtocolError("it did not show the right token")
        if hello.world_size != self.world_size:
            raise ProtocolError(f"it expects {hello.world_size} ranks, not {self.world_size}")
        return hello

    def interrupt(self) -> None:
        """Make a thread that waits in `accept` give up, with `OSError`."""
        with suppress(OSError):  # it may be closed already
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept nobody any more; safe to call twice."""
        self._listener.close()


def listen(address: tuple[str, int], backlog: int) -> socket.socket:
    """A non-blocking socket that listens at an address (port 0: any free port)."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = socket.create_server(address, family=family, backlog=backlog)
    listener.setblocking(False)
    return listener


def introductions(
    listener: socket.socket, read: Callable[[], Generator[memoryview, None, T]], timeout: float
) -> Generator[tuple[socket.socket, T], None, None]:
    """Accept connections and read the first message of each, all at the same time, until the deadline.

    Yields each connection with its message. A connection that fails or breaks the protocol is closed; so are, at the
    end, those that have sent nothing yet."""
    deadline = time.monotonic() + timeout
    messages: dict[socket.socket, T] = {}

    def first_message(sock: socket.socket) -> Generator[memoryview, None, None]:
        messages[sock] = yield from read()

    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.data is None:
                        sock, _ = listener.accept()
                        sock.setblocking(False)
                        selector.register(sock, selectors.EVENT_READ, MessageReader(sock, -1, first_message(sock)))
                        continue
                    sock = key.data.sock
                    try:
                        key.data.move()
                        if sock not in messages:
                            continue
                        prepare(sock)
                    except (StreamFailed, OSError) as error:
                        log.warning("closed a connection: %s", error)
                        messages.pop(sock, None)
                        selector.unregister(sock)
                        sock.close()
                    else:
                        selector.unregister(sock)
                        yield sock, messages.pop(sock)
        finally:
            for key in selector.get_map().values():
                if key.data:
                    key.data.sock.close()


def connect(address: tuple[str, int], peer: int, hello: Hello, timeout: float) -> socket.socket:
    """Connect to a peer's acceptor and send the hello."""
    link = Link.connect(*address, peer, timeout)
    link.send(frame(hello), f"connecting to {address[0]}:{address[1]}")
    return prepare(link.socket)


def prepare(sock: socket.socket) -> socket.socket:
    """Set the options of a connection for streams."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback and hasattr(socket, "TCP_CONGESTION"):
        # Nothing is congested here, and the system's default may pace what it sends (bbr): a third slower.
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return sock


@contextmanager
def _translate_errors(peer: int, operation: str, timeout: float) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except TimeoutError as error:
        raise GroupTimeout(peer, operation, timeout) from error
    except OSError as error:
        raise PeerLost(peer, operation, time.monotonic() - started, str(error)) from error


class Link:
    """A blocking connection to the peer with the given rank (-1: a coordinator or server).

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
        with _translate_errors(peer, f"connecting to {host}:{port}", timeout):
            return cls(socket.create_connection((host, port), timeout), peer, timeout)

    def send(self, data: Buffer, operation: str) -> None:
        """Send all of `data`."""
        view = memoryview(data).cast("B")
        with _translate_errors(self.peer, operation, self.timeout):
            while view:
                view = view[self.socket.send(view) :]

    def receive(self, count: int, operation: str) -> bytearray:
        """Receive exactly `count` bytes."""
        data = bytearray(count)
        view = memoryview(data)
        with _translate_errors(self.peer, operation, self.timeout):
            while view:
                received = self.socket.recv_into(view)
                if received == 0:
                    raise ConnectionError("the connection was closed")
                view = view[received:]
        return data

    def send_frame(self, payload: Buffer, operation: str) -> None:
        """Send one frame."""
        self.send(LENGTH.pack(len(payload)) + bytes(payload), operation)

    def receive_frame(self, limit: int, operation: str) -> bytearray:
        """Receive one frame of at most `limit` bytes; its payload."""
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
