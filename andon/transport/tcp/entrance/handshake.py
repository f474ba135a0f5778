"""Mutual authentication: before any other message, two peers prove to each other that they know a key.

    acceptor   challenge  "prove that you know the key; this is my nonce"
    connector  hello      "I am this rank, for this channel; my nonce and my proof"
    acceptor   accepted   "my proof"

A proof is an HMAC-SHA256 with the key over the prover's role, both nonces and the fields of the hello. The nonces are
fresh, so a recorded handshake is worthless; the roles differ, so a proof cannot be sent back to the peer that made it.
The key is never sent. On control links it is the run's token; each link between two ranks has a separate key
(`andon.transport.keys`), so that no rank can impersonate another.
"""

import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Final

from andon.transport.base import GroupError, ProtocolError
from andon.transport.tcp.frames import LENGTH, Accepted, Challenge, Hello, decode, frame, payload_length
from andon.transport.tcp.stream import read_frame

MAX_HANDSHAKE_BYTES: Final = 1 << 10
"""The longest frame that a peer may send before it has authenticated."""
HANDSHAKE_SECONDS: Final = 10.0
"""How long a handshake may take, from the first byte to the last."""
NOT_ANDON: Final = "the process that listens there is not part of an Andon run"


class NotAuthenticated(GroupError):
    """A peer did not prove that it knows the key."""


class Refused(NotAuthenticated):
    """A peer closed the connection instead of answering: it refused the proof, or has too many connections."""


def prove(key: bytes, role: str, challenge: str, hello: Hello) -> str:
    """The proof of one side of a handshake."""
    fields = [role, challenge, hello.nonce, hello.rank, hello.world_size, hello.generation, hello.channel]
    return hmac.digest(key, json.dumps(fields).encode(), "sha256").hex()


def authenticate(sock: socket.socket, key_of: Callable[[Hello], bytes]) -> Generator[memoryview, None, Hello]:
    """The acceptor's side, for a `MessageReader`: challenge a new connection and return its hello."""
    challenge = secrets.token_hex(32)
    _send_small(sock, frame(Challenge(challenge)))
    hello = decode((yield from read_frame(MAX_HANDSHAKE_BYTES)))
    if not isinstance(hello, Hello):
        raise ProtocolError("it did not introduce itself")
    key = key_of(hello)
    if not hmac.compare_digest(hello.proof.encode(), prove(key, "connector", challenge, hello).encode()):
        raise ProtocolError("it does not know the run's token")
    _send_small(sock, frame(Accepted(prove(key, "acceptor", challenge, hello))))
    return hello


def introduce(sock: socket.socket, hello: Hello, key: bytes, seconds: float = HANDSHAKE_SECONDS) -> None:
    """The connector's side, on a blocking socket: introduce this process, and authenticate the acceptor."""
    until = time.monotonic() + min(seconds, HANDSHAKE_SECONDS)
    challenge = _receive(sock, until)
    if not isinstance(challenge, Challenge):
        raise NotAuthenticated(NOT_ANDON)
    hello = replace(hello, nonce=secrets.token_hex(32))
    _set_time_left(sock, until)
    sock.sendall(frame(replace(hello, proof=prove(key, "connector", challenge.nonce, hello))))
    try:
        accepted = _receive(sock, until)
    except ConnectionError:
        raise Refused("the peer refused this process: their tokens differ") from None
    expected = prove(key, "acceptor", challenge.nonce, hello)
    if not isinstance(accepted, Accepted) or not hmac.compare_digest(accepted.proof.encode(), expected.encode()):
        raise NotAuthenticated("the process that listens there does not know the run's token")


def _receive(sock: socket.socket, until: float) -> object:
    try:
        length = payload_length(_exactly(sock, LENGTH.size, until), MAX_HANDSHAKE_BYTES)
        return decode(_exactly(sock, length, until))
    except ProtocolError:
        raise NotAuthenticated(NOT_ANDON) from None


def _exactly(sock: socket.socket, count: int, until: float) -> bytes:
    data = b""
    while len(data) < count:
        _set_time_left(sock, until)
        if not (more := sock.recv(count - len(data))):
            raise ConnectionError("the connection was closed")
        data += more
    return data


def _set_time_left(sock: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake took too long")
    sock.settimeout(left)


def _send_small(sock: socket.socket, data: bytes) -> None:
    """Send without blocking: the buffer of a new connection holds a few hundred bytes."""
    if sock.send(data) != len(data):
        raise ProtocolError("it does not read what it is sent")
