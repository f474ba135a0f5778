"""The door: how the connections of a group come about.

Whoever waits for peers opens a door and gives them its address and a token. A peer that knocks says hello:
its rank, what the connection is for (its *channel*) and the token. Strangers, and whoever else says anything
that was not expected, are turned away without holding up the rest.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, closing, suppress
from ipaddress import ip_address
from typing import Final, TypeVar

from andon.transport.base import GroupTimeout, PeerLost, ProtocolError
from andon.transport.tcp.frames import Hello, decode, frame
from andon.transport.tcp.stream import FlowFailed, Listening, read_frame

LONGEST_HELLO: Final = 1 << 10
T = TypeVar("T")
Place = tuple[str, int]
"""A channel and a rank."""

log = logging.getLogger(__name__)


class Door:
    """Listens at host:port (0: any free port) for the peers of a group of `world_size`."""

    def __init__(self, host: str, port: int, world_size: int, token: str | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=2 * world_size + 8)
        self._listener.setblocking(False)
        self.world_size = world_size
        self.token = secrets.token_hex(16) if token is None else token
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def accept(self, expected: set[Place], timeout: float) -> dict[Place, socket.socket]:
        """Wait for all expected connections."""
        accepted: dict[Place, socket.socket] = {}
        arriving = closing(introductions(self._listener, self._read_hello, timeout))
        with ExitStack() as undo, arriving as arrivals:
            undo.callback(lambda: _close_all(accepted.values()))
            while missing := expected - accepted.keys():
                sock, hello = next(arrivals, (None, None))
                if sock is None or hello is None:
                    channel, rank = min(missing, key=lambda place: place[1])
                    raise GroupTimeout(rank, f"joining ({channel})", timeout, "it did not connect")
                place = (hello.channel, hello.rank)
                if place in missing:
                    accepted[place] = sock
                else:
                    log.warning("closed a connection for %s of rank %d: it was not expected", *place)
                    sock.close()
            undo.pop_all()
        return accepted

    def _read_hello(self) -> Generator[memoryview, None, Hello]:
        hello = decode((yield from read_frame(LONGEST_HELLO)))
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            raise ProtocolError("it did not show the right token")
        if hello.world_size != self.world_size:
            raise ProtocolError(f"it expects {hello.world_size} ranks")
        return hello

    def interrupt(self) -> None:
        """Make a thread that waits in `accept` give up, with `OSError`."""
        with suppress(OSError):  # it may be closed already
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no one any more; safe to call twice."""
        self._listener.close()


def introductions(
    listener: socket.socket, read: Callable[[], Generator[memoryview, None, T]], timeout: float
) -> Generator[tuple[socket.socket, T], None, None]:
    """Accept connections and read the first message of each, all at the same time, until the deadline.

    Gives each connection with its message. One that fails or breaks the protocol is closed and holds up
    nobody, and so are those that have not said anything at the end."""
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
                        reader = Listening(sock, -1, first_message(sock))
                        selector.register(sock, selectors.EVENT_READ, reader)
                        continue
                    sock = key.data.sock
                    try:
                        key.data.move()
                        if sock not in messages:
                            continue
                        tune(sock)
                    except (FlowFailed, OSError) as error:
                        log.warning("closed a connection: %s", error)
                        messages.pop(sock, None)
                        selector.unregister(sock)
                        sock.close()
                    else:
                        selector.unregister(sock)
                        yield sock, messages.pop(sock)
        finally:
            _close_all(key.data.sock for key in selector.get_map().values() if key.data)


def knock(address: tuple[str, int], peer: int, hello: Hello, timeout: float) -> socket.socket:
    """Connect to a peer's door and say hello."""
    started = time.monotonic()
    operation = f"connecting to {address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, timeout)
        sock.sendall(frame(hello))
    except TimeoutError as error:
        raise GroupTimeout(peer, operation, time.monotonic() - started) from error
    except OSError as error:
        raise PeerLost(peer, operation, time.monotonic() - started, str(error)) from error
    return tune(sock)


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def tune(sock: socket.socket) -> socket.socket:
    """Set up a connection for streams."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback and hasattr(socket, "TCP_CONGESTION"):
        # Nothing is congested here. The system's default may pace what it sends (bbr), which costs a third.
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return sock
