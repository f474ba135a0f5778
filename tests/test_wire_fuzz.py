"""Malformed frames: each is refused with a clear `ProtocolError`, nobody else is harmed, memory stays flat.

`make soak` runs 100,000 of them against decoding, server and client; ANDON_SOAK_COUNT says another number.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from andon.engine.order import order_of_ranges
from andon.protocol2 import messages
from andon.protocol2.client import WorkerClient
from andon.protocol2.server import GradientServer
from andon.transport.base import ProtocolError
from andon.transport.tcp import frames as wire
from andon.transport.tcp.star_server import checked_operation

SOAK_COUNT = int(os.environ.get("ANDON_SOAK_COUNT", "100000"))
COUNTS = [200, pytest.param(SOAK_COUNT, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
STEP = 7
SECONDS = 20.0
FLOATS = np.arange(5, dtype=np.float32)
MB = 1 << 20
EVERY = {**wire.TRANSPORT, **messages.VERSION_2}

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
    wire.Hello(0, 2, "data", "token"),
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
bad_lengths = st.one_of(st.just(0), st.integers(wire.MAX_FRAME + 1, 2**32 - 1))


def examples(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    checks = list(HealthCheck)
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks
    )


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
        st.sampled_from(
            [messages.Shutdown(), messages.ShardAssignment(STEP, 0, 1), messages.JoinAccepted(0, 1)]
        ).map(lambda message: wire.frame(message)[4:]),
    )


@pytest.mark.parametrize("count", COUNTS)
def test_a_server_refuses_them_all_and_serves_the_others_on(count: int) -> None:
    """Two good workers and, again and again, a third that sends something wrong."""
    seen: list[bytes] = []
    with GradientServer() as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(server.wait_for_workers, 2, SECONDS)
        good = [join(server.address) for _ in range(2)]
        joining.result(SECONDS)
        assert sorted(receive(sock)[0] for sock in good) == [2, 2]
        good_frames = [
            wire.frame(messages.GradientPayload(STEP, number, FLOATS, 0.5, 1, 2))[4:] for number in range(2)
        ]

        def spoil(act: Callable[[socket.socket, int], None]) -> None:
            joining = pool.submit(server.wait_for_workers, 3, SECONDS)
            with join(server.address) as bad:
                joining.result(SECONDS)
                _, worker_id, _ = struct.unpack("<BII", receive(bad))
                for sock, payload in zip(good, good_frames, strict=True):
                    send(sock, payload)
                act(bad, worker_id)
                with pytest.raises(ProtocolError, match=f"worker {worker_id} "):
                    server.collect_and_reduce(STEP)
            assert [worker.worker_id for worker in server.workers] == [0, 1]

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

        for sock, payload in zip(good, good_frames, strict=True):
            send(sock, payload)
        server.broadcast_averaged(STEP, server.collect_and_reduce(STEP))
        for sock in good:
            averaged = wire.decode(receive(sock), EVERY)
            assert isinstance(averaged, messages.AveragedGradient)
            assert averaged.gradients.tolist() == FLOATS.tolist()
            sock.close()


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
                        client.receive_averaged(STEP)

        @examples(count // 2)
        @given(
            st.one_of(
                malformed, rubbish.filter(lambda payload: payload != wire.frame(messages.Shutdown())[4:])
            )
        )
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


numbers = st.lists(st.integers(0, 2**20), max_size=4).map(tuple)
names = st.sampled_from(["all-reduce", "reduce-scatter", "all-gather", "gather of bytes", "other"])
kinds = st.sampled_from(["float32", "bf16", "uint8", ""])


@pytest.mark.parametrize("count", COUNTS)
def test_a_star_accepts_an_operation_only_if_it_makes_sense(count: int) -> None:
    @examples(count)
    @given(names, st.integers(0, 2**40), kinds, numbers, st.integers(0, 2**21), numbers)
    def check(
        name: str, elements: int, kind: str, bounds: tuple[int, ...], slots: int, shares: tuple[int, ...]
    ) -> None:
        payload = wire.frame(wire.Operation(name, elements, kind, bounds, slots, shares))[4:]
        try:
            operation = checked_operation(payload, 2)
        except ProtocolError:
            return
        if operation.name in ("all-reduce", "reduce-scatter"):
            assert operation.bounds[-1] == operation.count
            assert order_of_ranges(operation.slots, operation.shares).world_size == 2

    check()
