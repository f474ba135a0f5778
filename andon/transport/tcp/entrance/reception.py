"""Connections that have proved nothing yet: accepted, heard out and timed out, without holding up anyone.

Until a connection has introduced itself it may send little (`andon.transport.tcp.entrance.handshake`), has a deadline
for all of it, and is one of a limited number; refusals are told in few lines.
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

MOST_UNKNOWN: Final = 128
"""Connections that may be in their handshake; one more closes another."""
PAUSE: Final = 0.2
"""Seconds without accepting when this process has no file descriptor left."""
QUIET_SECONDS: Final = 10.0
"""Refusals for the same reason are one line in this time."""
NUMBER: Final = re.compile(r"0x[0-9a-f]+|[0-9][0-9,]*")
"""What a stranger can vary in a reason."""
MOST_KINDS: Final = 20
CLOSED: Final = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
T = TypeVar("T")
Greet = Callable[[socket.socket], Generator[memoryview, None, T]]
"""Reads the first messages of a new connection, for a `MessageReader`; its result is what they come to."""

log = logging.getLogger(__name__)


class Refusals:
    """Says who was refused and why: one line at a time for each reason, with the number of those left out."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: dict[str, tuple[float, int]] = {}

    def add(self, who: str, reason: str) -> None:
        """Count a refusal, and say so unless the same was said a moment ago."""
        kind = NUMBER.sub("", reason)
        if kind not in self._told and len(self._told) >= MOST_KINDS:
            kind = "other"
        last, left_out = self._told.get(kind, (-QUIET_SECONDS, 0))
        if time.monotonic() - last < QUIET_SECONDS:
            self._told[kind] = (last, left_out + 1)
            return
        self._told[kind] = (time.monotonic(), 0)
        more = f" ({left_out:,} more were refused for that reason)" if left_out else ""
        self._say(f"Refused a connection from {who}: {reason}{more}")


class _Unknown(Generic[T]):
    """A connection that has not introduced itself yet."""

    def __init__(self, sock: socket.socket, who: str, greet: Greet[T]) -> None:
        self.sock, self.who, self.until = sock, who, time.monotonic() + HANDSHAKE_SECONDS
        self.result: T | None = None
        self._greet, self._reader = greet, None if isinstance(sock, ssl.SSLSocket) else self._new_reader(greet)

    def _new_reader(self, greet: Greet[T]) -> MessageReader:
        def read() -> Generator[memoryview, None, None]:
            self.result = yield from greet(self.sock)

        return MessageReader(self.sock, -1, read())

    def advance(self) -> bool:
        """Go on as far as its bytes go; whether it has introduced itself."""
        if self._reader is None:
            assert isinstance(self.sock, ssl.SSLSocket)
            try:
                self.sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            self._reader = self._new_reader(self._greet)
        while self._reader.done < self._reader.count and self._reader.move():
            pass
        return self._reader.done == self._reader.count


class Reception(Generic[T]):
    """Accepts connections at a listener and hears them out, all at the same time, within someone's selector."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        greet: Greet[T],
        tls: Tls | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._listener, self._selector, self._greet, self._tls = listener, selector, greet, tls
        self._unknown: list[_Unknown[T]] = []
        self._closed_until = 0.0
        self.refusals = Refusals(say)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self)

    def handle(self, data: object) -> tuple[socket.socket, T] | None:
        """Go on with what the selector has found ready; a connection that has introduced itself, if one has."""
        if data is self:
            self._accept()
        elif isinstance(data, _Unknown) and data in self._unknown:  # one that was ready may have been dropped since
            return self._advance(data)
        return None

    def tick(self) -> None:
        """Close connections that took too long; to be called about once a second."""
        now = time.monotonic()
        while self._unknown and self._unknown[0].until < now:
            self._refuse(self._unknown[0], f"it proved nothing within {HANDSHAKE_SECONDS:.0f} s")
        if 0 < self._closed_until < now:
            self._closed_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Close the listener and whoever has not introduced itself."""
        while self._unknown:
            self._drop(self._unknown[0])
        if not self._closed_until:
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
            if error.errno not in FULL:  # of the connection, which has gone again
                self.refusals.add("someone", f"the connection failed ({error.strerror})")
                return
            self.refusals.add("anyone", f"this process cannot open another connection ({error.strerror})")
            if self._unknown:
                self._drop(self._unknown[0])
            else:
                self._selector.unregister(self._listener)
                self._closed_until = time.monotonic() + PAUSE
            return
        if len(self._unknown) >= MOST_UNKNOWN:
            self._refuse(self._least_welcome(), f"more than {MOST_UNKNOWN} connections have proved nothing yet")
        try:
            sock.setblocking(False)
            unknown = _Unknown(self._tls.accept(sock) if self._tls else sock, address[0], self._greet)
        except (OSError, ProtocolError) as error:
            self.refusals.add(address[0], str(error))
            sock.close()
            return
        self._unknown.append(unknown)
        self._selector.register(unknown.sock, selectors.EVENT_READ, unknown)

    def _least_welcome(self) -> _Unknown[T]:
        """The oldest connection from the address that has most of them."""
        ((address, _),) = Counter(unknown.who for unknown in self._unknown).most_common(1)
        return next(unknown for unknown in self._unknown if unknown.who == address)

    def _advance(self, unknown: _Unknown[T]) -> tuple[socket.socket, T] | None:
        try:
            if not unknown.advance():
                return None
        except (StreamFailed, ProtocolError, OSError) as error:
            self._refuse(unknown, f"TLS failed: {error.reason}" if isinstance(error, ssl.SSLError) else str(error))
            return None
        self._selector.unregister(unknown.sock)
        self._unknown.remove(unknown)
        assert unknown.result is not None
        return unknown.sock, unknown.result

    def _refuse(self, unknown: _Unknown[T], reason: str) -> None:
        self.refusals.add(unknown.who, reason)
        self._drop(unknown)

    def _drop(self, unknown: _Unknown[T]) -> None:
        self._unknown.remove(unknown)
        with suppress(KeyError, ValueError, RuntimeError):  # its loop may have ended, and the selector with it
            self._selector.unregister(unknown.sock)
        unknown.sock.close()
