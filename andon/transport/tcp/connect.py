"""How ranks connect to each other.

A rank that waits for peers opens an acceptor and gives them its address. Both ends of a new connection prove that they
know the key of their link (`andon.transport.tcp.entrance.handshake`). A connection that sends anything else, or takes
too long, is refused without delaying the others.
"""

import logging
import secrets
import selectors
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from ipaddress import ip_address

from andon.errors import UserError
from andon.transport.base import GroupTimeout, PeerLost, ProtocolError, Rendezvous
from andon.transport.keys import LinkKeys
from andon.transport.tcp.entrance.handshake import NotAuthenticated, authenticate, introduce
from andon.transport.tcp.entrance.reception import PAUSE_SECONDS, Reception
from andon.transport.tcp.entrance.tls import Tls
from andon.transport.tcp.frames import Hello

Channel = tuple[str, int]
"""The purpose of a connection, "data" or "heartbeat", and the rank at its other end."""

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
        with ExitStack() as undo, closing(self._authenticated(timeout)) as connections:
            while missing := expected - accepted.keys():
                connection = next(connections, None)
                if connection is None:
                    channel, rank = min(missing, key=lambda each: each[1])
                    raise GroupTimeout(rank, f"joining ({channel})", timeout, "it did not connect")
                sock, hello = connection
                if (hello.channel, hello.rank) in missing:
                    accepted[hello.channel, hello.rank] = undo.enter_context(sock)
                else:
                    log.warning("closed an unexpected connection of rank %d (%s)", hello.rank, hello.channel)
                    sock.close()
            undo.pop_all()
        return accepted

    def _authenticated(self, timeout: float) -> Generator[tuple[socket.socket, Hello], None, None]:
        """Accept connections and authenticate them concurrently, until the deadline.

        A connection that fails or breaks the protocol is closed; so are, at the end, those that have not authenticated.
        The listener stays open."""
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            listener = self._listener.dup()
            reception = Reception(listener, selector, lambda sock: authenticate(sock, self._key_of), self.tls)
            try:
                while (left := deadline - time.monotonic()) > 0:
                    for key, _ in selector.select(min(left, PAUSE_SECONDS)):
                        if connection := reception.handle(key.data):
                            try:
                                prepare(connection[0])
                            except OSError:  # the peer has already closed it
                                connection[0].close()
                                continue
                            yield connection
                    reception.tick()
            finally:
                reception.close()

    def _key_of(self, hello: Hello) -> bytes:
        if hello.world_size != self.world_size:
            raise ProtocolError(f"it expects {hello.world_size} ranks, not {self.world_size}")
        if hello.generation != self.keys.generation:
            raise ProtocolError(f"it is of generation {hello.generation}, this is {self.keys.generation}")
        if hello.rank >= self.world_size or hello.rank not in self.keys.keys:
            raise ProtocolError("it has no rank of this group")
        return self.keys.of(hello.rank)

    def interrupt(self) -> None:
        """Make a thread that waits in `accept` raise `OSError`."""
        with suppress(OSError):  # the listener may be closed already
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._listener.close()


def agree_on_keys(rendezvous: Rendezvous, host: str) -> LinkKeys:
    """Derive keys for ranks of one machine that have none, from a secret that they make at the rendezvous."""
    check_loopback(host)
    secret = "".join(rendezvous.exchange("secret", secrets.token_hex(32))).encode()
    return LinkKeys.derive(secret, rendezvous.rank, rendezvous.world_size)


def check_loopback(host: str) -> None:
    """Refuse to connect ranks that have no token at an address that other machines can reach."""
    if not is_loopback(host):
        cause = f"{host} can be reached from other machines, and ranks could not authenticate who connects"
        remedy = "Set ANDON_TOKEN to the same secret text, of 16 characters or more, for every worker"
        raise UserError("Workers on several machines need a token", cause, remedy)


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only; a host name is resolved first."""
    try:
        found = {address[0] for *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def listen(address: tuple[str, int], backlog: int) -> socket.socket:
    """Open a non-blocking socket that listens at an address (port 0: any free port). An empty host, or `::`, is every
    address of this machine."""
    host, port = address
    if host in ("", "::"):
        if socket.has_dualstack_ipv6():
            listener = socket.create_server(("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("0.0.0.0", port), backlog=backlog)
    else:
        family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(found[:2], family=family, backlog=backlog)
    listener.setblocking(False)
    return listener


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
            prepare(sock)
        except NotAuthenticated as error:
            sock.close()
            raise type(error)(f"{operation}: {error}") from None
        except BaseException:
            sock.close()
            raise
    return sock


def prepare(sock: socket.socket) -> socket.socket:
    """Set the socket options that streams need."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback and hasattr(socket, "TCP_CONGESTION"):
        # Loopback has no congestion, and the system's default may pace packets (bbr): a third slower.
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    return sock


@contextmanager
def translate_errors(peer: int, operation: str, timeout: float) -> Iterator[None]:
    """Turn errors of a socket into errors of a group."""
    started = time.monotonic()
    try:
        yield
    except TimeoutError as error:
        raise GroupTimeout(peer, operation, timeout) from error
    except OSError as error:
        raise PeerLost(peer, operation, time.monotonic() - started, str(error)) from error
