"""Pending connections, which have not introduced themselves yet: accept, read and time out, without delaying others.

A pending connection may send little (`andon.transport.tcp.entrance.handshake`), has one deadline for all of it, and is
one of a limited number. Refusals are reported in few lines.
"""

import errno
import logging
import re
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Final, Generic, TypeVar

from andon.transport.base import ProtocolError
from andon.transport.tcp.entrance.handshake import HANDSHAKE_SECONDS
from andon.transport.tcp.entrance.tls import Tls
from andon.transport.tcp.stream import MessageReader, StreamFailed

MAX_PENDING: Final = 128
"""Pending connections; one more closes another."""
PAUSE_SECONDS: Final = 0.2
"""How long nothing is accepted when this process has no file descriptor left."""
QUIET_SECONDS: Final = 10.0
"""Refusals for the same reason are one line in this time."""
NUMBER: Final = re.compile(r"0x[0-9a-f]+|[0-9][0-9,]*")
"""The part of a reason that an attacker can vary."""
MAX_REASONS: Final = 20
CLOSED: Final = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
T = TypeVar("T")
Greet = Callable[[socket.socket], Generator[memoryview, None, T]]
"""Reads the first messages of a new connection, for a `MessageReader`, and returns what they contain."""

log = logging.getLogger(__name__)


class Refusals:
    """Reports who was refused and why: one line at a time for each reason, with the number of those left out."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reported: dict[str, tuple[float, int]] = {}

    def add(self, host: str, reason: str) -> None:
        """Count a refusal, and report it unless the same reason was reported a moment ago."""
        kind = NUMBER.sub("", reason)
        if kind not in self._reported and len(self._reported) >= MAX_REASONS:
            kind = "other"
        last, left_out = self._reported.get(kind, (-QUIET_SECONDS, 0))
        if time.monotonic() - last < QUIET_SECONDS:
            self._reported[kind] = (last, left_out + 1)
            return
        self._reported[kind] = (time.monotonic(), 0)
        more = f" ({left_out:,} more were refused for that reason)" if left_out else ""
        self._report(f"Refused a connection from {host}: {reason}{more}")


class _Pending(Generic[T]):
    """A connection that has not introduced itself yet."""

    def __init__(self, sock: socket.socket, host: str, greet: Greet[T]) -> None:
        self.sock, self.host, self.until = sock, host, time.monotonic() + HANDSHAKE_SECONDS
        self.result: T | None = None
        self._greet = greet
        # On a plain connection the greeting begins now; with TLS, after the TLS handshake.
        self._reader = None if isinstance(sock, ssl.SSLSocket) else MessageReader(sock, -1, self._read())

    def _read(self) -> Generator[memoryview, None, None]:
        self.result = yield from self._greet(self.sock)

    def advance(self) -> bool:
        """Read what has arrived; returns whether the connection has introduced itself."""
        if self._reader is None:
            assert isinstance(self.sock, ssl.SSLSocket)
            try:
                self.sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            self._reader = MessageReader(self.sock, -1, self._read())
        while self._reader.done < self._reader.count and self._reader.move():
            pass
        return self._reader.done == self._reader.count


class Reception(Generic[T]):
    """Accepts connections at a listener and reads their introductions concurrently, within the caller's selector."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        greet: Greet[T],
        tls: Tls | None = None,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        self._listener, self._selector, self._greet, self._tls = listener, selector, greet, tls
        self._pending: list[_Pending[T]] = []
        self._paused_until = 0.0
        self.refusals = Refusals(report)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self)

    def handle(self, data: object) -> tuple[socket.socket, T] | None:
        """Handle an event of the selector; returns a connection that has introduced itself, if there is one."""
        if data is self:
            self._accept()
        elif isinstance(data, _Pending) and data in self._pending:  # it may have been dropped after it became ready
            return self._advance(data)
        return None

    def tick(self) -> None:
        """Close connections that took too long; to be called about once a second."""
        now = time.monotonic()
        while self._pending and self._pending[0].until < now:
            self._refuse(self._pending[0], f"it proved nothing within {HANDSHAKE_SECONDS:.0f} s")
        if 0 < self._paused_until < now:
            self._paused_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Close the listener and all pending connections."""
        while self._pending:
            self._drop(self._pending[0])
        if not self._paused_until:
            with suppress(KeyError, ValueError, RuntimeError):
                self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno in CLOSED:
                raise
            if error.errno not in FULL:  # an error of the connection, which has closed again
                self.refusals.add("an unknown host", f"the connection failed ({error.strerror})")
                return
            self.refusals.add("any host", f"this process cannot open another connection ({error.strerror})")
            if self._pending:
                self._drop(self._pending[0])
            else:
                self._selector.unregister(self._listener)
                self._paused_until = time.monotonic() + PAUSE_SECONDS
            return
        if len(self._pending) >= MAX_PENDING:
            self._refuse(self._to_evict(), f"more than {MAX_PENDING} connections have proved nothing yet")
        try:
            sock.setblocking(False)
            pending = _Pending(self._tls.accept(sock) if self._tls else sock, address[0], self._greet)
        except (OSError, ProtocolError) as error:
            self.refusals.add(address[0], str(error))
            sock.close()
            return
        self._pending.append(pending)
        self._selector.register(pending.sock, selectors.EVENT_READ, pending)

    def _to_evict(self) -> _Pending[T]:
        """The oldest connection from the host that has most of them."""
        ((host, _),) = Counter(pending.host for pending in self._pending).most_common(1)
        return next(pending for pending in self._pending if pending.host == host)

    def _advance(self, pending: _Pending[T]) -> tuple[socket.socket, T] | None:
        try:
            if not pending.advance():
                return None
        except (StreamFailed, ProtocolError, OSError) as error:
            self._refuse(pending, f"TLS failed: {error.reason}" if isinstance(error, ssl.SSLError) else str(error))
            return None
        self._selector.unregister(pending.sock)
        self._pending.remove(pending)
        assert pending.result is not None
        return pending.sock, pending.result

    def _refuse(self, pending: _Pending[T], reason: str) -> None:
        self.refusals.add(pending.host, reason)
        self._drop(pending)

    def _drop(self, pending: _Pending[T]) -> None:
        self._pending.remove(pending)
        with suppress(KeyError, ValueError, RuntimeError):  # the caller may have closed the selector
            self._selector.unregister(pending.sock)
        pending.sock.close()
