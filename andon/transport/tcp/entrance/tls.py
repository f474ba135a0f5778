"""TLS encrypts the connections.

A process presents its certificate (`cert`, `key`) and checks that of its peer against `ca`. One that accepts
connections must have a certificate, one that connects must have `ca`. Host names are not compared: workers are known by
addresses, and authenticate with the run's token (`andon.transport.tcp.entrance.handshake`).
"""

import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from andon.errors import UserError

T = TypeVar("T")


class TlsSocket(ssl.SSLSocket):
    """A TLS connection that streams use like a plain, non-blocking one, from any thread."""

    def _without_blocking(self, work: Callable[[], T]) -> T:
        try:
            # OpenSSL lets one thread at a time use a connection.
            with self.__dict__.setdefault("lock", threading.Lock()):
                return work()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError(*error.args) from None

    def send(self, data: Any, flags: int = 0) -> int:
        """Send without blocking; TLS has no flags."""
        return self._without_blocking(lambda: super(TlsSocket, self).send(data))

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive without blocking, first the bytes that `recv` has peeked at."""
        if peeked := self.__dict__.pop("peeked", b""):
            buffer[: len(peeked)] = peeked
            return len(peeked)
        return self._without_blocking(lambda: super(TlsSocket, self).recv_into(buffer, nbytes))

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive without blocking; MSG_PEEK keeps the bytes for the next call."""
        peeked = self.__dict__.pop("peeked", b"")
        data: bytes = peeked or self._without_blocking(lambda: super(TlsSocket, self).recv(buflen))
        if flags & socket.MSG_PEEK:
            self.__dict__["peeked"] = data
        return data

    def setsockopt(self, *arguments: Any) -> None:
        """Set an option other than SO_RCVLOWAT: TLS reads ahead, so the bytes left in the kernel are no measure."""
        if arguments[:2] != (socket.SOL_SOCKET, socket.SO_RCVLOWAT):
            super().setsockopt(*arguments)


@dataclass(frozen=True)
class Tls:
    """Files of a certificate, its key, and the authority that must have signed peers' certificates."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def check(self) -> None:
        """Refuse files that cannot be used."""
        if bool(self.cert) != bool(self.key):
            raise UserError("A certificate needs its key", "--tls-cert and --tls-key go together", "Give both")
        if self.cert:
            _ = self._accepting
        if self.ca:
            _ = self._connecting

    def check_accepts(self) -> None:
        """Refuse to accept connections without a certificate."""
        _ = self._accepting

    def accept(self, sock: socket.socket) -> ssl.SSLSocket:
        """The accepting side of a new connection, before its handshake."""
        return self._accepting.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def connect(self, sock: socket.socket) -> ssl.SSLSocket:
        """The connecting side of a new connection, after its handshake."""
        return self._connecting.wrap_socket(sock)

    @cached_property
    def _accepting(self) -> ssl.SSLContext:
        if not self.cert:
            remedy = "Give --tls-cert and --tls-key"
            raise UserError("This process accepts connections and has no certificate", "TLS is on", remedy)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no session is resumed, and a ticket would look like data
        self._load(context)
        if self.ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @cached_property
    def _connecting(self) -> ssl.SSLContext:
        if not self.ca:
            what = "This process connects to others and cannot check their certificates"
            raise UserError(what, "TLS is on", "Give --tls-ca")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.sslsocket_class = TlsSocket
        try:
            if self.cert:
                context.load_cert_chain(self.cert, self.key, password=lambda: "")
            if self.ca:
                context.load_verify_locations(self.ca)
        except OSError as error:
            files = ", ".join(filter(None, (self.cert, self.key, self.ca)))
            remedy = "Give a PEM certificate, its key without a password, and the PEM certificate of the authority"
            raise UserError(f"The TLS files {files} cannot be used", str(error), remedy) from None
