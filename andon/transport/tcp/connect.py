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
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from typing import Final

from andon.transport.base import GroupTimeout, PeerLost, ProtocolError
from andon.transport.tcp.frames import LENGTH, Hello, decode, frame

LONGEST_HELLO: Final = 1 << 10
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
        hellos: dict[socket.socket, bytearray] = {}
        deadline = time.monotonic() + timeout
        with ExitStack() as undo, selectors.DefaultSelector() as selector:
            undo.callback(lambda: _close_all([*hellos, *accepted.values()]))
            selector.register(self._listener, selectors.EVENT_READ)
            while missing := expected - accepted.keys():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    channel, rank = min(missing, key=lambda place: place[1])
                    raise GroupTimeout(rank, f"joining ({channel})", timeout, "it did not connect")
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        sock, _ = self._listener.accept()
                        sock.setblocking(False)
                        hellos[sock] = bytearray()
                        selector.register(sock, selectors.EVENT_READ)
                        continue
                    sock = key.fileobj  # type: ignore[assignment]
                    try:
                        place = self._read_hello(sock, hellos[sock], missing)
                    except (ProtocolError, OSError) as error:
                        log.warning("turned away a connection: %s", error)
                        selector.unregister(sock)
                        del hellos[sock]
                        sock.close()
                        continue
                    if place:
                        selector.unregister(sock)
                        del hellos[sock]
                        accepted[place] = _tune(sock)
                        missing.discard(place)
            undo.pop_all()
            _close_all(hellos)
        return accepted

    def _read_hello(self, sock: socket.socket, data: bytearray, missing: set[Place]) -> Place | None:
        """Read on, never past the hello: what follows belongs to the channel."""
        wanted = LENGTH.size
        if len(data) >= wanted:
            wanted += LENGTH.unpack_from(data)[0]
        received = sock.recv(wanted - len(data))
        data += received
        if not received:
            raise ProtocolError("it was closed before it said hello")
        if len(data) == LENGTH.size and not 1 <= LENGTH.unpack_from(data)[0] <= LONGEST_HELLO:
            raise ProtocolError("its first message is not a hello")
        if len(data) == LENGTH.size or len(data) < wanted:
            return None
        hello = decode(bytes(data[LENGTH.size :]))
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            raise ProtocolError("it did not show the right token")
        if hello.world_size != self.world_size or (hello.channel, hello.rank) not in missing:
            raise ProtocolError(f"rank {hello.rank} of {hello.world_size} was not expected ({hello.channel})")
        return hello.channel, hello.rank

    def interrupt(self) -> None:
        """Make a thread that waits in `accept` give up, with `OSError`."""
        with suppress(OSError):  # it may be closed already
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no one any more; safe to call twice."""
        self._listener.close()


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
    return _tune(sock)


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def _tune(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback and hasattr(socket, "TCP_CONGESTION"):
        # Nothing is congested here. The system's default may pace what it sends (bbr), which costs a third.
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return sock
