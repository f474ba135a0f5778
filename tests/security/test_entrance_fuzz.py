"""Mutated handshakes and messages at every door of a run: no crash, no traceback, flat memory, and it still opens."""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil
import pytest

from andon.control.coordinator import Coordinator
from andon.control.worker.join import join
from andon.transport.base import ProtocolError
from andon.transport.keys import SERVER, LinkKeys
from andon.transport.tcp.connect import Acceptor, connect
from andon.transport.tcp.entrance.handshake import prove
from andon.transport.tcp.frames import Challenge, Hello, Operation, decode, frame
from andon.transport.tcp.star_server import checked_operation
from andon.version import VERSION
from tests.cluster.coordinators import TOKEN, coordinator_of

SEED = int(os.environ.get("ANDON_SOAK_SEED", "1"))
COUNT = int(os.environ.get("ANDON_SOAK_COUNT") or "100000")
COUNTS = [200, pytest.param(COUNT, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
SECONDS = 20.0
Attack = Callable[[random.Random], None]


def mutate(dice: random.Random, data: bytes) -> bytes:
    """The same bytes with a few faults."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        at = dice.randrange(len(changed)) if changed else 0
        match dice.randrange(7):
            case 0 if changed:
                changed[at] ^= 1 << dice.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = dice.randbytes(dice.randrange(1, 40))
            case 3:
                changed[:4] = struct.pack(">I", dice.choice((0, 1, 4, 1000, 1 << 20, 1 << 24, (1 << 32) - 1)))
            case 4:
                del changed[at : at + dice.randrange(1, 9)]
            case 5:
                changed += changed[at : at + 100]
            case _:
                changed[at : at + 4] = dice.randbytes(4)
    return bytes(changed)


def knock(address: tuple[str, int]) -> tuple[socket.socket, str]:
    sock = socket.create_connection(address, SECONDS)
    head = exactly(sock, 4)
    challenge = decode(exactly(sock, struct.unpack(">I", head)[0]))
    assert isinstance(challenge, Challenge)
    return sock, challenge.nonce


def exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data


def introduced(address: tuple[str, int], key: bytes, hello: Hello, dice: random.Random | None = None) -> socket.socket:
    """A connection that has introduced itself, with mutated bytes if dice are given."""
    sock, nonce = knock(address)
    hello = replace(hello, nonce=secrets.token_hex(32))
    data = frame(replace(hello, proof=prove(key, "connector", nonce, hello)))
    sock.sendall(mutate(dice, data) if dice else data)
    if not dice:
        exactly(sock, struct.unpack(">I", exactly(sock, 4))[0])
    return sock


def storm(count: int, attack: Attack) -> None:
    """Attack so many times, from a few threads; the memory of this process, which is the victim, stays flat."""
    process = psutil.Process()
    sizes = []

    def some(turn: int) -> None:
        dice = random.Random(f"{SEED} {turn}")
        for _ in range(count // 40):
            with suppress(OSError):  # of a connection that the victim has closed
                attack(dice)

    with ThreadPoolExecutor(4) as pool:
        for part in range(10):
            list(pool.map(some, range(4 * part, 4 * part + 4)))
            sizes.append(process.memory_info().rss >> 20)
    print(f"{count} attacks, memory {sizes} MB")
    assert sizes[-1] - sizes[1] < 20, sizes


@contextmanager
def no_thread_fails() -> Iterator[None]:
    """No thread of this process may end with an exception."""
    failures: list[Any] = []
    before, threading.excepthook = threading.excepthook, failures.append
    try:
        yield
    finally:
        threading.excepthook = before
    assert not failures, failures


@contextmanager
def door(world_size: int) -> Iterator[Coordinator]:
    with no_thread_fails(), coordinator_of(world_size) as found:
        yield found
        clients = [join(found.address, TOKEN, None)[1] for _ in range(world_size)]
        for client in clients:
            client.enter({"data": "digest", "folder": "mark"})
        assert all(client.wait_for_generation() for client in clients)
        for client in clients:
            client.leave(0)
        assert found.wait() == 0


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_handshakes_open_no_coordinator(count: int) -> None:
    with door(1) as coordinator:

        def attack(dice: random.Random) -> None:
            with introduced(coordinator.address, TOKEN.encode(), Hello(0, 0, 0, "control"), dice):
                pass

        storm(count, attack)


MESSAGES: list[dict[str, Any]] = [
    {"kind": "hello", "version": VERSION, "host": "h", "machine": "m", "pid": 1, "rank": None},
    {"kind": "ready", "data": "digest", "folder": "mark"},
    {"kind": "fetch"},
    {"kind": "failed", "what": "w", "cause": "c", "remedy": "r"},
    {"kind": "alive", "compute_ms": 12.5},
    {"kind": "value", "topic": "t", "value": "v"},
    {"kind": "store", "id": 1, "operation": "set", "key": "k", "value": "00"},
    {"kind": "store", "id": 2, "operation": "get", "key": "missing", "value": ""},
    {"kind": "store", "id": 3, "operation": "add", "key": "n", "value": "1"},
    {"kind": "event", "event": {"event": "note", "time": 1.0, "text": "t"}},
    {"kind": "event", "event": {"event": "step", "time": 1.0, "step": 1, "loss": 1.0}},
    {"kind": "bye", "code": 0},
]
VALUES: list[Any] = [None, True, -1, 1 << 70, 1e308, "", "x" * 5000, "\x1b[2J\x00", [], {}, [[]], {"event": {}}]


def message_frame(message: Any) -> bytes:
    payload = b"\x10" + json.dumps(message).encode()
    return struct.pack(">I", len(payload)) + payload


def mutated_message(dice: random.Random) -> bytes:
    """A message with a fault in its bytes, or in the value of a field."""
    message = dict(dice.choice(MESSAGES))
    if dice.random() < 0.5:
        return mutate(dice, message_frame(message))
    field = dice.choice(sorted(message))
    if dice.random() < 0.2:
        del message[field]
    else:
        message[field] = dice.choice(VALUES)
    return message_frame(message)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_messages_of_someone_who_knows_the_token_do_no_harm(count: int) -> None:
    """Each connection sends a mutated message at some point of the dialogue; the run never begins meanwhile."""
    with door(9) as coordinator:

        def attack(dice: random.Random) -> None:
            with introduced(coordinator.address, TOKEN.encode(), Hello(0, 0, 0, "control")) as sock:
                for valid in MESSAGES[: dice.choice((0, 1, 2))]:
                    sock.sendall(message_frame(valid))
                sock.sendall(b"".join(mutated_message(dice) for _ in range(3)))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass

        storm(count, attack)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("mine", [0, SERVER], ids=["ring", "star"])
def test_mutated_handshakes_open_no_link_between_ranks(mine: int, count: int) -> None:
    keys, theirs = LinkKeys.derive(b"secret", mine, 3), LinkKeys.derive(b"secret", 1, 3)
    acceptor = Acceptor("127.0.0.1", 0, 3, keys)
    with no_thread_fails(), closing(acceptor), ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(acceptor.accept, {("data", 2)}, 3600.0)

        def attack(dice: random.Random) -> None:
            with introduced(acceptor.address, theirs.of(mine), Hello(1, 3, 0, "data"), dice):
                pass

        storm(count, attack)
        right = LinkKeys.derive(b"secret", 2, 3).of(mine)
        connect(acceptor.address, mine, Hello(2, 3, 0, "data"), right, SECONDS).close()
        for sock in accepting.result(SECONDS).values():
            sock.close()


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_announcements_are_served_or_refused(count: int) -> None:
    dice = random.Random(SEED)
    served = 0
    for _ in range(count):
        good = Operation("reduce-scatter", 100, "float32", (0, 50, 100), 8, (0, 4, 8))
        try:
            operation = checked_operation(mutate(dice, frame(good))[4:], 2)
        except ProtocolError:
            continue
        served += 1
        assert operation.count == operation.bounds[-1] and operation.shares[-1] == operation.slots
    assert served < count
