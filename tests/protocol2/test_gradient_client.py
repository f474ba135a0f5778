"""Our worker as a client of gradient servers, Andon's or another's (C-WIRE-002)."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from andon.errors import UserError
from andon.protocol2.client import ServerHalted, ServerShutdown, WorkerClient
from andon.protocol2.mean import NonFiniteGradient
from andon.protocol2.server import GradientServer
from andon.protocol2.wire.dialogue import BLOCK, COMPONENT, WHOLE, Dialogue, Part
from andon.protocol2.wire.extension import PIECE_FLOATS
from andon.protocol2.wire.messages import JoinRequest
from andon.transport.base import GroupError, GroupTimeout, PeerLost, ProtocolError
from tests.kit.runs import soak
from tests.protocol2.plain_peers import SECONDS, PlainServer, PlainSocket

pytestmark = pytest.mark.timeout(60)  # a server that waits for ever is noticed soon


def join(server: PlainServer, heartbeat: float = 5.0) -> WorkerClient:
    return WorkerClient(server.address, JoinRequest("ours", 2, "cuda"), SECONDS, heartbeat)


def test_our_worker_joins_a_plain_server_for_a_whole_session() -> None:
    def conversation(plain: PlainSocket) -> None:
        plain.send(struct.pack("<BQQQ", 3, 6, 10, 20))
        assert plain.receive() == struct.pack("<BQIQ2ffQQ", 4, 6, 1, 2, 1.0, 2.0, 0.5, 3, 4)
        plain.send(struct.pack("<BI", 6, 1) + b"s" + struct.pack("<Q", 1))
        plain.send(struct.pack("<BQQ2ff", 5, 6, 2, 3.0, 4.0, 0.75))
        assert plain.receive() == struct.pack("<BQIIIIIQ2f", 8, 6, 1, 4, 24, 1, 2, 2, 1.0, 2.0)
        plain.send(struct.pack("<BQIIIQ2f", 9, 6, 4, 1, 2, 2, 5.0, 6.0))
        assert plain.receive() == struct.pack("<BQIBQ2f", 10, 6, 1, 2, 2, 1.0, 2.0)
        plain.send(struct.pack("<BQBQ2f", 11, 6, 2, 2, 7.0, 8.0))
        plain.send(b"\x07")

    mine = np.array([1.0, 2.0], np.float32)
    with PlainServer(conversation) as server, join(server) as client:
        assert (client.worker_id, client.total_workers) == (1, 3)
        assignment = client.receive_assignment()
        assert assignment
        assert (assignment.step, assignment.shard_start, assignment.shard_end) == (6, 10, 20)
        averaged, loss = client.average(6, mine, (0.5, 3, 4))
        assert (averaged.tolist(), loss) == ([3.0, 4.0], 0.75)
        assert client.average_part(Part(BLOCK, 6, 4, 24, (2,)), mine).tolist() == [5.0, 6.0]
        assert client.average_part(Part(COMPONENT, 6, 2), mine).tolist() == [7.0, 8.0]
        assert client.receive_assignment() is None


@pytest.mark.parametrize(
    ("payload", "error", "complaint"),
    [
        (struct.pack("<BQQff", 5, 7, 1, 1.0, 1.0), ProtocolError, "step 7"),
        (struct.pack("<BQBQf", 11, 6, 0, 1, 1.0), ProtocolError, "AveragedNonBlockGradient"),
        (struct.pack("<BQQff", 5, 6, 2, 1.0, 1.0), ProtocolError, "cut short"),
        (struct.pack("<BQQfff", 5, 6, 2, 1.0, 1.0, 1.0), ProtocolError, "a mean of 2 floats for a gradient of 1"),
        (b"\x99", ProtocolError, "0x99"),
        (b"\x07", ServerShutdown, "ended the session"),
    ],
)
def test_our_worker_refuses_what_it_did_not_ask_for(payload: bytes, error: type[GroupError], complaint: str) -> None:
    def conversation(plain: PlainSocket) -> None:
        plain.receive()
        plain.send(payload)

    with PlainServer(conversation) as server, join(server) as client, pytest.raises(error, match=complaint):
        client.average(6, np.ones(1, np.float32))


def test_our_worker_refuses_a_frame_above_the_cap() -> None:
    def conversation(plain: PlainSocket) -> None:
        plain.receive()
        plain.sock.sendall(struct.pack(">I", 100_000_001))

    with PlainServer(conversation) as server, join(server) as client, pytest.raises(ProtocolError, match="100,000,001"):
        client.average(6, np.ones(1, np.float32))


def test_our_worker_sends_another_server_nothing_that_version_2_lacks_and_waits_for_it() -> None:
    def conversation(plain: PlainSocket) -> None:
        plain.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            plain.sock.recv(1)
        plain.send(struct.pack("<BQQQ", 3, 0, 0, 9))
        plain.sock.settimeout(SECONDS)
        assert plain.sock.recv(1) == b""

    with PlainServer(conversation) as server:
        client = WorkerClient(server.address, JoinRequest("ours", 2, "cuda"), dead_after=0.1, heartbeat=0.01)
        assert client.receive_assignment()
        with pytest.raises(UserError, match="25,000,000 floats is too long") as caught:
            client.average(0, np.empty(25_000_000, np.float32))
        assert "andon gradient-server" in caught.value.remedy
        client.close()


def test_the_longest_message_of_version_2_is_sent_whole() -> None:
    def conversation(plain: PlainSocket) -> None:
        assert len(plain.receive()) == 99_999_997
        plain.send(struct.pack("<BQQ", 5, 0, 24_999_989) + bytes(99_999_956) + struct.pack("<f", 1.0))

    with PlainServer(conversation) as server, join(server) as client:
        assert not client.average(0, np.ones(24_999_989, np.float32))[0].any()


def test_a_worker_with_more_than_a_thousand_open_files_leaves_as_any_other() -> None:
    """`select` cannot wait for a descriptor above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        server, pool = stack.enter_context(GradientServer()), stack.enter_context(ThreadPoolExecutor(1))
        while stack.enter_context(open(os.devnull)).fileno() < 1023:
            pass

        def work() -> None:
            with WorkerClient(server.address, JoinRequest("ours", 0, "cpu")) as client:
                assert client.average(0, np.ones(1, np.float32))[0] == 1

        working = pool.submit(work)
        server.wait_for_workers(1, SECONDS)
        server.broadcast(server.collect(Dialogue()))
        server.wait_until_left(SECONDS)
        working.result(SECONDS)


@pytest.mark.parametrize("tag", [WHOLE, soak(BLOCK), soak(COMPONENT)])
def test_our_own_peers_exchange_what_is_too_long_for_a_message_in_pieces(tag: int) -> None:
    length = 25_000_001
    rows = [np.full(length, value, np.float32) for value in (1.0, 4.0)]
    rows[1][-1] = 7.0

    def work(address: tuple[str, int]) -> tuple[float, float, float, int]:
        with WorkerClient(address, JoinRequest("ours", 0, "cpu")) as client:
            mine = rows[client.worker_id]
            if tag == WHOLE:
                mean, loss = client.average(0, mine, (float(client.worker_id), 1, 2))
                assert loss == 0.5
            elif tag == BLOCK:
                mean = client.average_part(Part(BLOCK, 0, 0, 1, (length,), length=length), mine)
            else:
                mean = client.average_part(Part(COMPONENT, 0, 0, length=length), mine)
            return float(mean[0]), float(mean[-2]), float(mean[-1]), len(mean)

    with GradientServer() as server, ThreadPoolExecutor(2) as pool:
        working = [pool.submit(work, server.address) for _ in rows]
        server.wait_for_workers(2, SECONDS)
        dialogue = Dialogue()
        for start in range(0, length, PIECE_FLOATS):
            mean = server.collect(dialogue)
            assert mean.part.start == start and len(mean.gradients) <= PIECE_FLOATS
            server.broadcast(mean)
        assert [each.result(SECONDS) for each in working] == [(2.5, 2.5, 4.0, length)] * 2


def test_our_worker_is_told_why_the_server_halted() -> None:
    with GradientServer() as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(WorkerClient, server.address, JoinRequest("n", 0, "cpu"))
        server.wait_for_workers(1, SECONDS)
        with joining.result(SECONDS) as client:
            averaging = pool.submit(client.average, 3, np.full(1, np.nan, np.float32))
            with pytest.raises(NonFiniteGradient) as caught:
                server.collect(Dialogue())
            server.halt(3, str(caught.value))
            with pytest.raises(ServerHalted, match=r"step 3: halt: worker 0 sent a non-finite gradient"):
                averaging.result(SECONDS)


def test_a_heartbeat_that_the_kernel_takes_half_of_is_completed() -> None:
    name = "n" * 10_000
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(WorkerClient, listener.getsockname(), JoinRequest(name, 0, "cpu"), SECONDS, 0.002)
        plain = PlainSocket(listener.accept()[0])
        plain.receive()
        plain.send(struct.pack("<BQ", 0x40, 1000))
        plain.send(struct.pack("<BII", 2, 0, 1))
        with plain.sock, joining.result(SECONDS) as client:
            until = time.monotonic() + SECONDS
            while not client._unsent and time.monotonic() < until:  # nobody reads: the kernel fills
                time.sleep(0.01)
            averaging = pool.submit(client.average, 0, np.ones(1, np.float32))
            while (payload := plain.receive())[0] == 6:
                assert payload[5:-8] == name.encode()
            assert payload == struct.pack("<BQIQffQQ", 4, 0, 0, 1, 1.0, 0.0, 0, 0)
            plain.send(struct.pack("<BQQff", 5, 0, 1, 1.0, 0.0))
            assert averaging.result(SECONDS)[0].tolist() == [1.0]


def test_our_worker_gives_up_a_silent_server_of_ours() -> None:
    with GradientServer(heartbeat=1000.0) as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(WorkerClient, server.address, JoinRequest("n", 0, "cpu"), 0.3)
        server.wait_for_workers(1, SECONDS)
        with joining.result(SECONDS) as client, pytest.raises(GroupTimeout):
            client.receive_assignment()


def test_our_worker_learns_that_the_server_is_gone() -> None:
    with PlainServer(lambda plain: None) as server, join(server) as client, pytest.raises(PeerLost):
        client.receive_assignment()


def test_our_workers_and_our_server_leave_no_thread_behind() -> None:
    before = threading.active_count()
    with GradientServer(heartbeat=0.01) as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(WorkerClient, server.address, JoinRequest("n", 0, "cpu"), SECONDS, 0.01)
        server.wait_for_workers(1, SECONDS)
        client = joining.result(SECONDS)
        averaging = pool.submit(client.average, 0, np.ones(10, np.float32), (1.0, 1, 1))
        server.broadcast(server.collect(Dialogue()))
        assert averaging.result(SECONDS)[0].tolist() == [1.0] * 10
        client.close()
        client.close()
    server.close()
    assert threading.active_count() == before
