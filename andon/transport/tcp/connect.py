"""Connections: how ranks connect to each other.

A rank that waits for peers opens an acceptor and gives them its address. Both ends of a new connection prove that they
know the key of their link (`andon.transport.tcp.entrance.handshake`). Whoever says anything else, or takes too long, is
refused and holds up nobody.
"""

import logging
import secrets
import selectors
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from ipaddress import ip_address
from typing import TypeVar

from andon.errors import UserError
from andon.transport.base import GroupTimeout, PeerLost, ProtocolError, Rendezvous
from andon.transport.keys import LinkKeys
from andon.transport.tcp.entrance.handshake import NotAuthenticated, authenticate, introduce
from andon.transport.tcp.entrance.reception import PAUSE, Greet, Reception
from andon.transport.tcp.entrance.tls import Tls
from andon.transport.tcp.frames import Hello

T = TypeVar("T")
Channel = tuple[str, int]
"""What a connection is for, and the rank at its other end."""

log = logging.getLogger(__name__)


class Acceptor:
    """Listens at host:port (0: any free port) for the peers of a group of `world_size`."""

    def __init__(self, host: str, port: int, world_size: int, keys: LinkKeys, tls: Tls | None = None) -> None:
        self._listener = listen((host, port), backlog=2 * world_size + 8)
        self.world_size, self.keys, self.tls = world_size, keys, tls
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def accept(self, expected: set[Channel], timeout: float) -> dict[Channel, socket.socket]:
        """Wait for all expected connections."""
        accepted: dict[Channel, socket.socket] = {}
        arriving = introductions(self._listener, lambda sock: authenticate(sock, self._key_of), timeout, self.tls)
        with ExitStack() as undo, closing(arriving) as arrivals:
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

    def _key_of(self, hello: Hello) -> bytes:
        if hello.world_size != self.world_size:
            raise ProtocolError(f"it expects {hello.world_size} ranks, not {self.world_size}")
        if hello.generation != self.keys.generation:
            raise ProtocolError(f"it is of generation {hello.generation}, this is {self.keys.generation}")
        if hello.rank >= self.world_size or hello.rank not in self.keys.keys:
            raise ProtocolError("it has no rank of this group")
        return self.keys.of(hello.rank)

    def interrupt(self) -> None:
        """Make a thread that waits in `accept` give up, with `OSError`."""
        with suppress(OSError):  # it may be closed already
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept nobody any more; safe to call twice."""
        self._listener.close()


def agree_on_keys(rendezvous: Rendezvous, host: str) -> LinkKeys:
    """Keys for ranks that were given none, on one machine: from a secret that all of them make at the rendezvous."""
    check_loopback(host)
    secret = "".join(rendezvous.exchange("secret", secrets.token_hex(32))).encode()
    return LinkKeys.derive(secret, rendezvous.rank, rendezvous.world_size)


def check_loopback(host: str) -> None:
    """Refuse to connect ranks that have no token at an address that other machines reach."""
    if not is_loopback(host):
        cause = f"{host} can be reached from other machines, and ranks would not know who connects"
        remedy = "Set ANDON_TOKEN to the same secret text, of 16 characters or more, for every worker"
        raise UserError("Workers on several machines need a token", cause, remedy)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only; a name is not taken at its word."""
    try:
        found = {place[0] for *_, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ip_address(str(place).partition("%")[0]).is_loopback for place in found)


def listen(address: tuple[str, int], backlog: int) -> socket.socket:
    """A non-blocking socket that listens at an address (port 0: any free port). An empty host, or `::`, is every
    address of this machine."""
    host, port = address
    if host in ("", "::"):
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("0.0.0.0", port), backlog=backlog)
    else:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(place[:2], family=family, backlog=backlog)
    listener.setblocking(False)
    return listener


def introductions(
    listener: socket.socket, greet: Greet[T], timeout: float, tls: Tls | None = None
) -> Generator[tuple[socket.socket, T], None, None]:
    """Accept connections and read the first messages of each, all at the same time, until the deadline.

    Yields each connection with what `greet` gave. A connection that fails or breaks the protocol is closed; so are, at
    the end, those that have not introduced themselves. The listener stays open."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        reception = Reception(listener.dup(), selector, greet, tls)
        try:
            while (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(min(left, PAUSE)):
                    if arrival := reception.handle(key.data):
                        try:
                            prepare(arrival[0])
                        except OSError:  # it has gone again
                            arrival[0].close()
                            continue
                        yield arrival
                reception.tick()
        finally:
            reception.close()


def connect(
    address: tuple[str, int], peer: int, hello: Hello, key: bytes, timeout: float, tls: Tls | None = None
) -> socket.socket:
    """Connect to a peer's acceptor; both prove that they know the key of the link."""
    operation = f"connecting to {address[0]}:{address[1]}"
    with translate_errors(peer, operation, timeout):
        sock = socket.create_connection(address, timeout)
        try:
            sock = tls.connect(sock) if tls else sock
            introduce(sock, hello, key, timeout)
            return prepare(sock)
        except NotAuthenticated as error:
            sock.close()
            raise type(error)(f"{operation}: {error}") from None
        except BaseException:
            sock.close()
            raise
    raise AssertionError("unreachable")


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
def translate_errors(peer: int, operation: str, timeout: float) -> Iterator[None]:
    """Turn errors of a socket into those of a group."""
    started = time.monotonic()
    try:
        yield
    except TimeoutError as error:
        raise GroupTimeout(peer, operation, timeout) from error
    except OSError as error:
        raise PeerLost(peer, operation, time.monotonic() - started, str(error)) from error
