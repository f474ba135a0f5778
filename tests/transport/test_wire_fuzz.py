"""Malformed frames: each is refused with a clear `ProtocolError`, nobody else is harmed, memory stays flat.

`make soak` runs 100,000 of them against decoding, server and client; ANDON_SOAK_COUNT says another number.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from andon.engine.gradients.order import order_of_ranges
from andon.protocol2.client import WorkerClient
from andon.protocol2.connections import WorkerGone
from andon.protocol2.server import GradientServer
from andon.protocol2.wire import messages
from andon.protocol2.wire.dialogue import Dialogue
from andon.protocol2.wire.extension import EXTENDED, Abilities, AveragedPiece, GradientPiece, Halted, WorkerLost
from andon.transport.base import ProtocolError
from andon.transport.keys import SERVER
from andon.transport.tcp import frames as wire
from andon.transport.tcp.connect import connect
from andon.transport.tcp.star_server import StarServer, checked_operation
from tests.kit.group_harness import link_keys

SOAK_COUNT = int(os.environ.get("ANDON_SOAK_COUNT", "100000"))
COUNTS = [200, pytest.param(SOAK_COUNT, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
STEP = 7
SECONDS = 20.0
FLOATS = np.arange(5, dtype=np.float32)
MB = 1 << 20
EVERY = {**wire.TRANSPORT, **EXTENDED}

TEMPLATES: list[wire.Message] = [
    messages.JoinRequest("worker", 1, "cpu"),
    messages.JoinAccepted(0, 2),
    messages.ShardAssignment(STEP, 0, 10),
    messages.GradientPayload(STEP, 1, FLOATS, 0.5, 1, 2),
    messages.AveragedGradient(STEP, FLOATS, 0.5),
    messages.Heartbeat("node", 1),
    messages.BlockGradientPayload(STEP, 1, 0, 2, (2, 3), FLOATS),
    messages.AveragedBlockGradient(STEP, 0, (2, 3), FLOATS),
    messages.NonBlockGradientPayload(STEP, 1, 0, FLOATS),
    messages.AveragedNonBlockGradient(STEP, 0, FLOATS),
    Abilities(1024),
    WorkerLost(1, "gone"),
    Halted(3, "NaN"),
    GradientPiece(STEP, 1, 4, 0, 0, (), 5, 15, FLOATS, 0.5, 1, 2),
    AveragedPiece(STEP, 4, 0, 5, FLOATS, 0.5),
    wire.Hello(0, 2, 0, "data", "nonce", "proof"),
    wire.Challenge("nonce"),
    wire.Accepted("proof"),
    wire.Operation("all-reduce", 10, "float32", (0, 10), 2, (0, 1, 2)),
    wire.Broken("lost", 1, "gone"),
]
payloads = st.sampled_from([wire.frame(message)[4:] for message in TEMPLATES])


@st.composite
def cut_short(draw: st.DrawFn) -> bytes:
    payload = draw(payloads)
    return payload[: draw(st.integers(1, len(payload) - 1))]


@st.composite
def too_long(draw: st.DrawFn) -> bytes:
    return draw(payloads) + draw(st.binary(min_size=1, max_size=40))


@st.composite
def wrong_counts(draw: st.DrawFn) -> bytes:
    """A length or count inside the payload says something else than it should."""
    payload = bytearray(draw(payloads))
    at = draw(st.integers(1, max(1, len(payload) - 4)))
    payload[at : at + 4] = struct.pack("<I", draw(st.sampled_from([6, 255, 65_536, 2**31, 2**32 - 1])))
    return bytes(payload)


@st.composite
def not_utf_8(draw: st.DrawFn) -> bytes:
    tag, tail = draw(st.sampled_from([(1, struct.pack("<II", 1, 0)), (6, struct.pack("<Q", 1))]))
    text = draw(st.sampled_from([b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"]))
    return struct.pack("<BI", tag, len(text)) + text + tail


@st.composite
def wrong_tag(draw: st.DrawFn) -> bytes:
    return bytes([draw(st.sampled_from([0, 0x0C, 0x0F, 0x7F, 0xFF]))]) + draw(payloads)[1:]


rubbish = st.binary(min_size=1, max_size=200)
malformed = st.one_of(cut_short(), too_long(), not_utf_8(), wrong_tag())
dubious = st.one_of(wrong_counts(), rubbish)
bad_lengths = st.one_of(st.just(0), st.integers(wire.MAX_FRAME_BYTES + 1, 2**32 - 1))


def examples(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    checks = list(HealthCheck)
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks)


def stays_flat(act: Callable[[bytes], None], payloads: list[bytes], count: int) -> bool:
    """Whether doing it over and over takes no more memory; without hypothesis and logs, which remember."""
    logging.disable(logging.CRITICAL)
    try:
        resident = []
        for turn in range(count):
            if turn in (count // 2, count - 1):
                resident.append(psutil.Process().memory_info().rss / MB)
            act(payloads[turn % len(payloads)])
    finally:
        logging.disable(logging.NOTSET)
    return resident[-1] - resident[0] < 10


@pytest.mark.parametrize("count", COUNTS)
def test_decoding_refuses_every_malformed_payload(count: int) -> None:
    @examples(count)
    @given(malformed)
    def check(payload: bytes) -> None:
        with pytest.raises(ProtocolError) as caught:
            wire.decode(payload, EVERY)
        assert len(str(caught.value)) > 10

    check()


@pytest.mark.parametrize("count", COUNTS)
def test_decoding_a_dubious_payload_gives_that_very_payload_or_an_error(count: int) -> None:
    @examples(count)
    @given(dubious)
    def check(payload: bytes) -> None:
        try:
            message = wire.decode(payload, EVERY)
        except ProtocolError:
            return
        assert wire.frame(message)[4:] == payload

    check()


def send(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(struct.pack(">I", len(payload)) + payload)


def receive(sock: socket.socket) -> bytes:
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
        more = sock.recv(65_536)
        assert more, "the connection was closed"
        data += more
    return data[4:]


def join(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address, SECONDS)
    send(sock, wire.frame(messages.JoinRequest("w", 0, "cpu"))[4:])
    return sock


def wrong_gradient(worker_id: int) -> st.SearchStrategy[bytes]:
    """Well-formed, and not what the server waits for."""
    ints = st.integers(0, 2**32 - 1)
    return st.one_of(
        ints.filter(lambda step: step != STEP).map(
            lambda step: wire.frame(messages.GradientPayload(step, worker_id, FLOATS, 0.5, 1, 2))[4:]
        ),
        ints.filter(lambda number: number != worker_id).map(
            lambda number: wire.frame(messages.GradientPayload(STEP, number, FLOATS, 0.5, 1, 2))[4:]
        ),
        st.integers(0, 4).map(
            lambda size: wire.frame(messages.GradientPayload(STEP, worker_id, FLOATS[:size], 0.5, 1, 2))[4:]
        ),
        st.sampled_from([messages.Shutdown(), messages.ShardAssignment(STEP, 0, 1), messages.JoinAccepted(0, 1)]).map(
            lambda message: wire.frame(message)[4:]
        ),
    )


@pytest.mark.parametrize("count", COUNTS)
def test_a_server_refuses_them_all_and_serves_the_others_on(count: int) -> None:
    """Two good workers and a third that sends something wrong, again and again."""
    seen: list[bytes] = []

    def spoil(act: Callable[[socket.socket, int], None]) -> None:
        lost: list[WorkerGone] = []
        with GradientServer(on_lost=lost.append) as server:
            joining = pool.submit(server.wait_for_workers, 3, SECONDS)
            socks = [join(server.address) for _ in range(3)]
            joining.result(SECONDS)
            numbers = [struct.unpack("<BII", receive(sock))[1] for sock in socks]
            for sock, number in list(zip(socks, numbers, strict=True))[:2]:
                send(sock, wire.frame(messages.GradientPayload(STEP, number, FLOATS, 0.5, 1, 2))[4:])
            act(socks[2], numbers[2])
            server.broadcast(server.collect(Dialogue(STEP)))
            assert [(gone.worker.worker_id, gone.cause) for gone in lost] == [(numbers[2], "protocol")]
            for sock in socks[:2]:
                averaged = wire.decode(receive(sock), EVERY)
                assert isinstance(averaged, messages.AveragedGradient)
                assert averaged.gradients.tolist() == FLOATS.tolist()
        for sock in socks:
            sock.close()

    with ThreadPoolExecutor(1) as pool:

        @examples(count // 3)
        @given(st.one_of(malformed, rubbish))
        def check_malformed(payload: bytes) -> None:
            seen.append(payload)
            spoil(lambda bad, _: send(bad, payload))

        @examples(count // 3)
        @given(st.data())
        def check_wrong(data: st.DataObject) -> None:
            spoil(lambda bad, worker_id: send(bad, data.draw(wrong_gradient(worker_id))))

        @examples(count // 3)
        @given(bad_lengths)
        def check_lengths(length: int) -> None:
            spoil(lambda bad, _: bad.sendall(struct.pack(">I", length)))

        check_malformed()
        check_wrong()
        check_lengths()
        assert stays_flat(lambda payload: spoil(lambda bad, _: send(bad, payload)), seen, count // 10)


@pytest.mark.parametrize("count", COUNTS)
def test_a_worker_refuses_them_all(count: int) -> None:
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = listener.getsockname()

        def hear(act: Callable[[socket.socket], None]) -> None:
            joining = pool.submit(WorkerClient, address, messages.JoinRequest("w", 0, "cpu"), SECONDS, 0.0)
            sock, _ = listener.accept()
            with sock:
                receive(sock)
                sock.sendall(wire.frame(messages.JoinAccepted(0, 1)))
                with joining.result(SECONDS) as client:
                    act(sock)
                    with pytest.raises(ProtocolError):
                        client.average(STEP, FLOATS)

        @examples(count // 2)
        @given(st.one_of(malformed, rubbish.filter(lambda payload: payload != wire.frame(messages.Shutdown())[4:])))
        def check_malformed(payload: bytes) -> None:
            seen.append(payload)
            hear(lambda sock: send(sock, payload))

        @examples(count // 2)
        @given(bad_lengths)
        def check_lengths(length: int) -> None:
            hear(lambda sock: sock.sendall(struct.pack(">I", length)))

        check_malformed()
        check_lengths()
        assert stays_flat(lambda payload: hear(lambda sock: send(sock, payload)), seen, count // 10)


KINDS = {"all-reduce": ["float32", "bf16"], "reduce-scatter": ["float32", "bf16"], "all-gather": ["uint8"]}
RANKS = 2
MOST = 64  # slots, and thousands of elements: what the test has the server compute


@st.composite
def bounds_of(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    return (0, *sorted(draw(st.lists(st.integers(0, total), min_size=RANKS - 1, max_size=RANKS - 1))), total)


@st.composite
def valid_operations(draw: st.DrawFn) -> wire.Operation:
    name = draw(st.sampled_from(sorted(KINDS)))
    count, slots = draw(st.integers(0, 1000 * MOST)), draw(st.integers(1, MOST))
    bounds = (0, count) if name == "all-reduce" else draw(bounds_of(count))
    shares = draw(bounds_of(slots))
    return wire.Operation(name, count, draw(st.sampled_from(KINDS[name])), bounds, slots, shares)


@st.composite
def mutated_operations(draw: st.DrawFn) -> wire.Operation:
    """A valid operation with one field changed; about half of them still make sense."""
    operation = draw(valid_operations())
    numbers = st.lists(st.integers(0, 2**20), max_size=4).map(tuple)
    changes: dict[str, st.SearchStrategy[Any]] = {
        "name": st.sampled_from([*KINDS, "gather of bytes", ""]),
        "count": st.integers(0, 2**40),
        "wire": st.sampled_from(["float32", "bf16", "uint8", "int64", ""]),
        "bounds": bounds_of(operation.count) | numbers,
        "slots": st.integers(0, 2**21),
        "shares": bounds_of(operation.slots) | numbers,
    }
    field = draw(st.sampled_from(sorted(changes)))
    return replace(operation, **{field: draw(changes[field])})


class PlainRanks:
    """The ranks of a star, by hand: they send the bytes that an operation asks for and check the answer."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.data, self.heartbeats = (
            [self._connect(address, rank, channel) for rank in range(RANKS)] for channel in ("data", "heartbeat")
        )

    def _connect(self, address: tuple[str, int], rank: int, channel: str) -> socket.socket:
        hello = wire.Hello(rank, RANKS, 0, channel)
        sock = connect(address, SERVER, hello, link_keys(rank, RANKS).of(SERVER), SECONDS)
        sock.settimeout(SECONDS)
        return sock

    def close(self) -> None:
        for sock in self.heartbeats:
            sock.sendall(wire.frame(wire.Leaving()))
        for sock in self.data + self.heartbeats:
            sock.close()

    def do(self, operation: wire.Operation) -> None:
        """Small integers are summed, which bf16 holds exactly in any order."""
        gathers, bounds = operation.name == "all-gather", operation.bounds
        parts = [slice(lo, hi) for lo, hi in pairwise(bounds)]
        nodes = [] if gathers else order_of_ranges(operation.slots, operation.shares).nodes
        rows = [1] * RANKS if gathers else [len(own) for own in nodes]
        values = np.arange(operation.count) % 3
        with ThreadPoolExecutor(RANKS) as pool:
            sending = []
            for rank, sock in enumerate(self.data):
                own = [parts[rank]] if gathers else parts
                body = b"".join(as_sent(values[part] + rank, operation.wire) * rows[rank] for part in own)
                sending.append(pool.submit(sock.sendall, wire.frame(operation) + body))
            for rank, sock in enumerate(self.data):
                if gathers:
                    other = 1 - rank
                    want = as_sent(values[parts[other]] + other, operation.wire)
                else:
                    total = rows[0] * values + rows[1] * (values + 1)
                    want = as_sent(total[parts[rank if len(parts) > 1 else 0]], operation.wire)
                assert exactly(sock, len(want)) == want
            for each in sending:
                each.result(SECONDS)


def as_sent(values: npt.NDArray[np.int64], kind: str) -> bytes:
    if kind == "bf16":
        return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    return values.astype(np.float32 if kind == "float32" else np.uint8).tobytes()


def exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        assert more, "the connection was closed"
        data += more
    return bytes(data)


@pytest.mark.parametrize("count", COUNTS)
def test_a_star_serves_an_operation_exactly_if_it_makes_sense(count: int) -> None:
    served, refused = Counter[str](), 0
    server = StarServer(("127.0.0.1", 0), RANKS, SECONDS, link_keys(SERVER, RANKS))
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve)
        ranks = PlainRanks(server.address)

        @examples(count)
        @given(valid_operations() | mutated_operations())
        def check(operation: wire.Operation) -> None:
            nonlocal refused
            try:
                accepted = checked_operation(wire.frame(operation)[4:], RANKS)
            except ProtocolError:
                refused += 1
                return
            assert accepted == operation
            if operation.slots <= 16 * MOST or operation.name == "all-gather":
                ranks.do(operation)
                served[operation.name] += 1

        try:
            check()
        finally:
            ranks.close()
            server.close()
        serving.result(SECONDS)
    assert refused > count / 10 and all(served[name] > count / 20 for name in KINDS), (refused, served)


def test_a_star_refuses_an_operation_that_makes_no_sense_and_says_whose_it_was() -> None:
    good = wire.Operation("all-reduce", 10, "float32", (0, 10), 2, (0, 1, 2))
    for bad in (replace(good, wire="int64"), replace(good, bounds=(0, 9)), replace(good, shares=(0, 2))):
        server = StarServer(("127.0.0.1", 0), RANKS, SECONDS, link_keys(SERVER, RANKS))
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(server.serve)
            ranks = PlainRanks(server.address)
            for sock, operation in zip(ranks.data, (good, bad), strict=True):
                sock.sendall(wire.frame(operation))
            with pytest.raises(ProtocolError, match="rank 1 broke the protocol"):
                serving.result(SECONDS)
            ranks.close()
