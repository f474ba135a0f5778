"""Mutual authentication: before anything else is said, two peers prove to each other that they know a key.

    acceptor   challenge  "prove that you know the key; this is my nonce"
    connector  hello      "I am this rank, for this channel; my nonce and my proof"
    acceptor   accepted   "my proof"

A proof is an HMAC-SHA256 with the key over the prover's role, both nonces and what the hello says. The nonces are
fresh, so a recorded handshake is worth nothing; the roles differ, so a proof cannot be sent back to the peer that made
it. The key never travels. On control links it is the run's token; each link between two ranks has a key of its own
(`andon.transport.keys`), so that no rank can pass for another one.
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

LONGEST_FRAME: Final = 1 << 10
"""Bytes that a peer may announce before it has proved anything."""
HANDSHAKE_SECONDS: Final = 10.0
"""How long a handshake may take, from the first byte to the last."""


class NotAuthenticated(GroupError):
    """A peer did not prove that it knows the key."""


class Refused(NotAuthenticated):
    """A peer has closed the connection instead of an answer: it refused the proof, or knows no more room."""


def prove(key: bytes, role: str, challenge: str, hello: Hello) -> str:
    """The proof of one side of a handshake."""
    said = [role, challenge, hello.nonce, hello.rank, hello.world_size, hello.generation, hello.channel]
    return hmac.digest(key, json.dumps(said).encode(), "sha256").hex()


def authenticate(sock: socket.socket, key_of: Callable[[Hello], bytes]) -> Generator[memoryview, None, Hello]:
    """The acceptor's side, for a `MessageReader`: challenges a new connection and gives its hello."""
    challenge = secrets.token_hex(32)
    _send_small(sock, frame(Challenge(challenge)))
    hello = decode((yield from read_frame(LONGEST_FRAME)))
    if not isinstance(hello, Hello):
        raise ProtocolError("it did not introduce itself")
    key = key_of(hello)
    if not hmac.compare_digest(hello.proof.encode(), prove(key, "connector", challenge, hello).encode()):
        raise ProtocolError("it does not know the run's token")
    _send_small(sock, frame(Accepted(prove(key, "acceptor", challenge, hello))))
    return hello


def introduce(sock: socket.socket, hello: Hello, key: bytes, seconds: float = HANDSHAKE_SECONDS) -> None:
    """The connector's side, on a blocking socket: introduce this process, and check who answers."""
    until = time.monotonic() + min(seconds, HANDSHAKE_SECONDS)
    challenge = _receive(sock, until)
    if not isinstance(challenge, Challenge):
        raise NotAuthenticated("whoever listens there is not part of an Andon run")
    hello = replace(hello, nonce=secrets.token_hex(32))
    _set_time_left(sock, until)
    sock.sendall(frame(replace(hello, proof=prove(key, "connector", challenge.nonce, hello))))
    try:
        accepted = _receive(sock, until)
    except ConnectionError:
        raise Refused("it refused this process: their tokens differ") from None
    expected = prove(key, "acceptor", challenge.nonce, hello)
    if not isinstance(accepted, Accepted) or not hmac.compare_digest(accepted.proof.encode(), expected.encode()):
        raise NotAuthenticated("whoever listens there does not know the run's token")


def _receive(sock: socket.socket, until: float) -> object:
    try:
        length = payload_length(_exactly(sock, LENGTH.size, until), LONGEST_FRAME)
        return decode(_exactly(sock, length, until))
    except ProtocolError:
        raise NotAuthenticated("whoever listens there is not part of an Andon run") from None


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
    """Send without blocking: a new connection has room for a few hundred bytes."""
    if sock.send(data) != len(data):
        raise ProtocolError("it does not read")
