"""The star: version 2 as others speak it (C-WIRE-002), and our own ranks around a server.

`PlainWorker` and `PlainServer` are written from the specification of the wire alone: plain sockets, their own
packing, nothing of `andon.group.wire`.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from andon.group.base import GroupError, GroupTimeout, PeerLost, ProtocolError, Wire
from andon.group.gradient_server import GradientServer, NonFiniteGradient
from andon.group.star import SERVER, StarGroup
from andon.group.star_server import StarServer
from andon.group.wire import JoinRequest
from andon.group.worker_client import ServerShutdown, WorkerClient
from andon.order import plan, plan_ranges

SECONDS = 20.0


class PlainSocket:
    """Frames, by hand."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SECONDS)
        self.sock = sock

    def send(self, payload: bytes) -> None:
        self.sock.sendall(struct.pack(">I", len(payload)) + payload)

    def receive(self) -> bytes:
        (length,) = struct.unpack(">I", self.exactly(4))
        return self.exactly(length)

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.sock.recv(count - len(data))
            assert more, "the connection was closed"
            data += more
        return data

    def is_closed(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True


class PlainWorker(PlainSocket):
    """A version-2 worker as someone else would write it."""

    def __init__(self, address: tuple[str, int], name: str = "plain", join: bool = True) -> None:
        super().__init__(socket.create_connection(address))
        if join:
            text = name.encode()
            self.send(struct.pack("<BI", 1, len(text)) + text + struct.pack("<II", 1, 3) + b"cpu")
            tag, self.worker_id, self.total_workers = struct.unpack("<BII", self.receive())
            assert tag == 2

    def shard(self) -> tuple[int, int, int]:
        tag, step, start, end = struct.unpack("<BQQQ", self.receive())
        assert tag == 3
        return step, start, end

    def send_gradient(self, step: int, values: list[float], loss: float, correct: int, total: int) -> None:
        floats = struct.pack(f"<Q{len(values)}f", len(values), *values)
        head = struct.pack("<BQI", 4, step, self.worker_id)
        self.send(head + floats + struct.pack("<fQQ", loss, correct, total))

    def averaged(self) -> tuple[int, list[float], float]:
        payload = self.receive()
        tag, step, count = struct.unpack_from("<BQQ", payload)
        assert tag == 5
        *values, loss = struct.unpack_from(f"<{count}ff", payload, 17)
        assert len(payload) == 17 + 4 * count + 4
        return step, values, loss

    def send_block(self, step: int, block: int, sizes: list[int], values: list[float]) -> None:
        head = struct.pack("<BQIII", 8, step, self.worker_id, block, 24)
        shape = struct.pack(f"<I{len(sizes)}I", len(sizes), *sizes)
        self.send(head + shape + struct.pack(f"<Q{len(values)}f", len(values), *values))

    def averaged_block(self) -> tuple[int, int, list[int], list[float]]:
        payload = self.receive()
        tag, step, block, components = struct.unpack_from("<BQII", payload)
        assert tag == 9
        *sizes, count = struct.unpack_from(f"<{components}IQ", payload, 17)
        values = struct.unpack_from(f"<{count}f", payload, 17 + 4 * components + 8)
        return step, block, sizes, list(values)

    def send_non_block(self, step: int, component: int, values: list[float]) -> None:
        head = struct.pack("<BQIB", 10, step, self.worker_id, component)
        self.send(head + struct.pack(f"<Q{len(values)}f", len(values), *values))

    def averaged_non_block(self) -> tuple[int, int, list[float]]:
        payload = self.receive()
        tag, step, component, count = struct.unpack_from("<BQBQ", payload)
        assert tag == 11
        return step, component, list(struct.unpack_from(f"<{count}f", payload, 18))

    def beat(self) -> None:
        self.send(struct.pack("<BI", 6, 5) + b"plain" + struct.pack("<Q", 1234))


@contextmanager
def session(count: int, dead_after: float = 30.0) -> Iterator[tuple[GradientServer, list[PlainWorker]]]:
    """A server and so many plain workers that have joined, in the order of their numbers."""
    with GradientServer(dead_after=dead_after) as server, ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        joining = pool.submit(server.wait_for_workers, count, SECONDS)
        workers = [PlainWorker(server.address, f"plain-{number}") for number in range(count)]
        for worker in workers:
            stack.callback(worker.sock.close)
        joining.result(SECONDS)
        yield server, workers


def test_a_server_listens_on_a_free_port_and_knows_nobody() -> None:
    with GradientServer() as server:
        assert server.address[1] > 0
        assert server.worker_count == 0


def test_a_worker_joins_and_is_told_its_number() -> None:
    with session(1) as (server, (worker,)):
        assert (worker.worker_id, worker.total_workers) == (0, 1)
        assert [(w.worker_id, w.node_id, w.gpu_count, w.backend) for w in server.workers] == [
            (0, "plain-0", 1, "cpu")
        ]


def test_the_server_gives_up_waiting_at_the_deadline() -> None:
    with GradientServer() as server, pytest.raises(GroupTimeout, match="2 workers were expected"):
        server.wait_for_workers(2, 0.1)


def test_a_whole_session_of_plain_workers() -> None:
    with session(2) as (server, workers):
        assert [worker.worker_id for worker in workers] == [0, 1]
        server.send_shard_assignments(0, 101)
        assert [worker.shard() for worker in workers] == [(0, 0, 50), (0, 50, 101)]

        workers[0].send_gradient(0, [1.0, 2.0, -8.0], 0.5, 10, 25)
        workers[1].send_gradient(0, [2.0, 3.0, 8.0], 1.5, 20, 75)
        result = server.collect_and_reduce(0)
        assert result.gradients.tolist() == [1.5, 2.5, 0.0]
        assert result.global_loss == pytest.approx((0.5 * 25 + 1.5 * 75) / 100)
        assert (result.total_correct, result.total_samples) == (30, 100)
        assert result.milliseconds >= 0
        server.broadcast_averaged(0, result)
        for worker in workers:
            assert worker.averaged() == (0, [1.5, 2.5, 0.0], 1.25)

        workers[0].send_block(1, 3, [2, 1], [1.0, 2.0, 3.0])
        workers[1].send_block(1, 3, [2, 1], [3.0, 4.0, 5.0])
        block = server.collect_and_reduce_block(1, 3)
        assert (block.block, block.component_sizes, block.gradients.tolist()) == (3, (2, 1), [2.0, 3.0, 4.0])
        server.broadcast_averaged_block(1, block)
        for worker in workers:
            assert worker.averaged_block() == (1, 3, [2, 1], [2.0, 3.0, 4.0])

        for component in (0, 1, 2):
            for worker in workers:
                worker.send_non_block(1, component, [float(worker.worker_id), 4.0])
            part = server.collect_and_reduce_non_block(1, component)
            server.broadcast_averaged_non_block(1, part)
            for worker in workers:
                assert worker.averaged_non_block() == (1, component, [0.5, 4.0])

        server.shutdown_workers()
        for worker in workers:
            assert worker.receive() == b"\x07"


def test_the_mean_is_added_in_the_one_order_and_streams_over_many_pieces() -> None:
    rows = [torch.randn(300_001, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    expected = [row.clone() for row in rows]
    plan(3, 3).add_up(expected)
    with session(3) as (server, workers), ThreadPoolExecutor(3) as pool:
        for worker, row in zip(workers, rows, strict=True):
            pool.submit(worker.send_gradient, 4, row.tolist(), 1.0, 1, 1)
        result = server.collect_and_reduce(4)
    assert np.array_equal(result.gradients, (expected[0] / 3).numpy())


def test_no_samples_make_no_loss() -> None:
    with session(1) as (server, (worker,)):
        worker.send_gradient(0, [], 3.0, 0, 0)
        result = server.collect_and_reduce(0)
        assert (result.global_loss, result.total_samples, len(result.gradients)) == (0.0, 0, 0)


def test_heartbeats_are_welcome_at_any_point() -> None:
    with session(2) as (server, workers):
        for worker in workers:
            worker.beat()
        workers[0].beat()
        for worker in workers:
            worker.send_gradient(0, [1.0], 1.0, 1, 1)
            worker.beat()
        server.broadcast_averaged(0, server.collect_and_reduce(0))
        for worker in workers:
            worker.send_block(1, 0, [1], [1.0])
        server.collect_and_reduce_block(1, 0)


def test_who_sends_heartbeats_gets_heartbeats() -> None:
    with GradientServer(heartbeat=0.05) as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(server.wait_for_workers, 2, SECONDS)
        workers = [PlainWorker(server.address) for _ in range(2)]
        joining.result(SECONDS)
        workers[0].beat()
        for worker in workers:
            worker.send_gradient(0, [1.0], 1.0, 1, 1)
        result = server.collect_and_reduce(0)
        assert workers[0].receive()[:1] == b"\x06"
        server.broadcast_averaged(0, result)
        assert workers[1].averaged() == (0, [1.0], 1.0)
        for worker in workers:
            worker.sock.close()


Spoil = Callable[[PlainWorker], None]
SPOILS: dict[str, tuple[Spoil, str]] = {
    "another step": (lambda w: w.send_gradient(8, [1.0], 1.0, 1, 1), "step 8 where 7 was expected"),
    "another message": (lambda w: w.send_block(7, 0, [1], [1.0]), "where GradientPayload was expected"),
    "a message for workers": (lambda w: w.send(b"\x07"), "Shutdown where GradientPayload was expected"),
    "another worker's number": (
        lambda w: w.send(struct.pack("<BQIQffQQ", 4, 7, 0, 1, 1.0, 1.0, 1, 1)),
        "it calls itself worker 0",
    ),
    "another length": (lambda w: w.send_gradient(7, [1.0, 2.0], 1.0, 1, 1), "another shape"),
    "too large a frame": (lambda w: w.sock.sendall(struct.pack(">I", 100_000_001)), "100,000,001 bytes"),
    "an empty frame": (lambda w: w.sock.sendall(bytes(4)), "0 bytes"),
    "an unknown tag": (lambda w: w.send(b"\x77"), "0x77"),
    "a false count": (
        lambda w: w.send(struct.pack("<BQIQffQQ", 4, 7, 1, 2**40, 1.0, 1.0, 1, 1)),
        "1,099,511,627,776 floats",
    ),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_who_breaks_the_protocol_is_named_and_dropped_and_the_others_go_on(spoil: str) -> None:
    act, complaint = SPOILS[spoil]
    with session(3) as (server, workers):
        for worker in workers:
            if worker.worker_id != 1:
                worker.send_gradient(7, [3.0], 1.0, 1, 1)
        act(workers[1])
        with pytest.raises(ProtocolError, match=complaint) as caught:
            server.collect_and_reduce(7)
        assert "worker 1" in str(caught.value)
        assert workers[1].is_closed()
        assert [worker.worker_id for worker in server.workers] == [0, 2]
        server.send_shard_assignments(7, 10)
        assert [workers[0].shard(), workers[2].shard()] == [(7, 0, 5), (7, 5, 10)]
        workers[0].send_gradient(7, [1.0], 1.0, 1, 1)
        workers[2].send_gradient(7, [2.0], 1.0, 1, 1)
        assert server.collect_and_reduce(7).gradients.tolist() == [1.5]


@pytest.mark.parametrize(
    ("send", "collect", "complaint"),
    [
        (lambda w: w.send_block(1, 5, [1], [1.0]), lambda s: s.collect_and_reduce_block(1, 4), "block 5"),
        (lambda w: w.send_block(1, 4, [2], [1.0]), lambda s: s.collect_and_reduce_block(1, 4), "sizes for 2"),
        (lambda w: w.send_block(2, 4, [1], [1.0]), lambda s: s.collect_and_reduce_block(1, 4), "step 2"),
        (
            lambda w: w.send_non_block(1, 2, [1.0]),
            lambda s: s.collect_and_reduce_non_block(1, 0),
            "component 2",
        ),
        (lambda w: w.send_non_block(3, 0, [1.0]), lambda s: s.collect_and_reduce_non_block(1, 0), "step 3"),
    ],
)
def test_a_wrong_block_component_or_size_is_refused(
    send: Spoil, collect: Callable[[GradientServer], Any], complaint: str
) -> None:
    with session(1) as (server, (worker,)):
        send(worker)
        with pytest.raises(ProtocolError, match=complaint):
            collect(server)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_halts_and_names_worker_step_and_place(value: float) -> None:
    with session(2) as (server, workers):
        workers[0].send_gradient(3, [1.0] * 200_000, 1.0, 1, 1)
        workers[1].send_gradient(3, [1.0] * 199_999 + [value], 1.0, 1, 1)
        with pytest.raises(NonFiniteGradient, match=r"halt: worker 1 .* step 3") as caught:
            server.collect_and_reduce(3)
        assert (caught.value.rank, caught.value.step, caught.value.where) == (1, 3, "whole vector")
        for worker in workers:
            worker.send_block(4, 2, [1], [value if worker.worker_id == 0 else 1.0])
        with pytest.raises(NonFiniteGradient, match=r"worker 0 .* step 4 .block 2"):
            server.collect_and_reduce_block(4, 2)
        for worker in workers:
            worker.send_non_block(5, 1, [value])
        with pytest.raises(NonFiniteGradient, match=r"worker 0 .* step 5 .component 1"):
            server.collect_and_reduce_non_block(5, 1)
        server.shutdown_workers()
        assert [worker.receive() for worker in workers] == [b"\x07", b"\x07"]


def test_a_worker_that_breaks_off_in_the_middle_is_lost_and_the_others_go_on() -> None:
    with session(2) as (server, workers):
        workers[0].send_gradient(0, [1.0] * 100_000, 1.0, 1, 1)
        workers[1].sock.sendall(struct.pack(">IBQIQ", 33 + 400_000, 4, 0, 1, 100_000)[:20])
        workers[1].sock.close()
        with pytest.raises(PeerLost) as caught:
            server.collect_and_reduce(0)
        assert caught.value.rank == 1
        workers[0].send_gradient(0, [2.0], 1.0, 1, 1)
        assert server.collect_and_reduce(0).gradients.tolist() == [2.0]


def test_a_silent_worker_is_given_up_while_a_slow_one_that_beats_is_waited_for() -> None:
    with session(2, dead_after=0.5) as (server, workers), ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(server.collect_and_reduce, 0)
        until = time.monotonic() + SECONDS
        while not collecting.done() and time.monotonic() < until:
            workers[0].beat()
            time.sleep(0.1)
            if server.worker_count == 1:
                workers[0].send_gradient(0, [1.0], 1.0, 1, 1)
                break
        with pytest.raises(GroupTimeout) as caught:
            collecting.result(SECONDS)
        assert caught.value.rank == 1
        assert [worker.worker_id for worker in server.workers] == [0]


def test_strangers_at_the_door_do_not_hold_up_the_workers() -> None:
    with GradientServer() as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(server.wait_for_workers, 1, SECONDS)
        silent = PlainWorker(server.address, join=False)
        rude = PlainWorker(server.address, join=False)
        rude.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        early = PlainWorker(server.address, join=False)
        early.send(b"\x07")
        worker = PlainWorker(server.address)
        joining.result(SECONDS)
        assert worker.worker_id == 0
        assert rude.is_closed()
        assert early.is_closed()
        assert silent.is_closed()
        worker.sock.close()


class PlainServer:
    """One side of a conversation with a `WorkerClient`: does as the test says in a thread."""

    def __init__(self, conversation: Callable[[PlainSocket], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._pool = ThreadPoolExecutor(1)
        self._done: Future[None] = self._pool.submit(self._serve, conversation)

    def _serve(self, conversation: Callable[[PlainSocket], None]) -> None:
        sock, _ = self._listener.accept()
        with sock:
            plain = PlainSocket(sock)
            payload = plain.receive()
            assert payload == struct.pack("<BI", 1, 4) + b"ours" + struct.pack("<II", 2, 4) + b"cuda"
            plain.send(struct.pack("<BII", 2, 1, 3))
            conversation(plain)

    def __enter__(self) -> PlainServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._done.result(SECONDS)
        self._pool.shutdown()


def join(server: PlainServer, heartbeat: float = 0.0) -> WorkerClient:
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
        client.send_gradients(6, mine, 0.5, 3, 4)
        averaged = client.receive_averaged(6)
        assert (averaged.gradients.tolist(), averaged.global_loss) == ([3.0, 4.0], 0.75)
        client.send_block(6, 4, 24, (2,), mine)
        assert client.receive_averaged_block(6, 4).gradients.tolist() == [5.0, 6.0]
        client.send_non_block(6, 2, mine)
        assert client.receive_averaged_non_block(6, 2).gradients.tolist() == [7.0, 8.0]
        assert client.receive_assignment() is None


@pytest.mark.parametrize(
    ("payload", "error", "complaint"),
    [
        (struct.pack("<BQQff", 5, 7, 1, 1.0, 1.0), ProtocolError, "step 7"),
        (struct.pack("<BQBQf", 11, 6, 0, 1, 1.0), ProtocolError, "AveragedNonBlockGradient"),
        (struct.pack("<BQQff", 5, 6, 2, 1.0, 1.0), ProtocolError, "cut short"),
        (b"\x99", ProtocolError, "0x99"),
        (b"\x07", ServerShutdown, "ended the session"),
    ],
)
def test_our_worker_refuses_what_it_did_not_ask_for(
    payload: bytes, error: type[GroupError], complaint: str
) -> None:
    with (
        PlainServer(lambda plain: plain.send(payload)) as server,
        join(server) as client,
        pytest.raises(error, match=complaint),
    ):
        client.receive_averaged(6)


def test_our_worker_refuses_a_frame_above_the_cap() -> None:
    def conversation(plain: PlainSocket) -> None:
        plain.sock.sendall(struct.pack(">I", 100_000_001))

    with (
        PlainServer(conversation) as server,
        join(server) as client,
        pytest.raises(ProtocolError, match="100,000,001"),
    ):
        client.receive_averaged(6)


def test_our_worker_sends_heartbeats_between_its_messages() -> None:
    def conversation(plain: PlainSocket) -> None:
        for _ in range(2):
            payload = plain.receive()
            assert payload[:9] == struct.pack("<BI", 6, 4) + b"ours"
        plain.send(b"\x07")

    with PlainServer(conversation) as server, join(server, heartbeat=0.05) as client:
        assert client.receive_assignment() is None


def test_our_worker_learns_that_the_server_is_gone() -> None:
    with PlainServer(lambda plain: None) as server, join(server) as client, pytest.raises(PeerLost):
        client.receive_assignment()


def test_our_workers_and_our_server_leave_no_thread_behind() -> None:
    before = threading.active_count()
    with GradientServer(heartbeat=0.01) as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(WorkerClient, server.address, JoinRequest("n", 0, "cpu"), SECONDS, 0.01)
        server.wait_for_workers(1, SECONDS)
        client = joining.result(SECONDS)
        client.send_gradients(0, np.ones(10, np.float32), 1.0, 1, 1)
        server.broadcast_averaged(0, server.collect_and_reduce(0))
        assert client.receive_averaged(0).gradients.tolist() == [1.0] * 10
        client.close()
        client.close()
    server.close()
    assert threading.active_count() == before


class Seat:
    """A rendezvous for a star, whose ranks need no exchange."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def exchange(self, topic: str, mine: str) -> list[str]:
        raise AssertionError("a star knows its server")


@contextmanager
def star(
    size: int, timeout: float = SECONDS, token: str = "", wire: Wire = "f32"
) -> Iterator[tuple[list[StarGroup], Future[None]]]:
    """The ranks of a star, in this process, and what its server comes to."""
    server = StarServer(("127.0.0.1", 0), size, timeout, token)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve)
        groups = [StarGroup.open(Seat(rank, size), server.address, timeout, wire) for rank in range(size)]
        try:
            yield groups, serving
        finally:
            for group in groups:
                group.close()
            server.close()


def everyone(groups: list[StarGroup], act: Callable[[StarGroup], Any]) -> list[Any]:
    """What came of it, by rank: a result or an exception."""
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(act, group) for group in groups]
        return [future.exception(SECONDS) or future.result(SECONDS) for future in futures]


def test_a_server_ends_when_its_ranks_have_left_and_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with star(2) as (groups, serving):
        everyone(groups, lambda group: group.barrier())
        for group in groups:
            group.close()
        serving.result(SECONDS)
    assert threading.active_count() == before


@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("shares", [(0, 0, 5, 8), (0, 3, 3, 8), (0, 1, 7, 8), (0, 8, 8, 8)])
def test_owners_finish_long_sums_in_the_one_order_and_send_nothing_of_what_they_own(
    shares: tuple[int, ...], wire: Wire
) -> None:
    count, order = 600_001, plan_ranges(8, shares)
    bounds = [0, 20_000, 20_000, count]
    leaves = [torch.randn(count, generator=torch.Generator().manual_seed(leaf)) for leaf in range(8)]
    leaves = leaves[: len(order.leaves)]
    mine = [[leaf for leaf, (rank, _) in enumerate(order.leaves) if rank == r] or [0] for r in range(3)]
    rows = [torch.stack([leaves[leaf] for leaf in own]) for own in mine]
    with star(3, wire=wire) as (groups, _):
        assert (
            everyone(groups, lambda group: group.reduce_scatter(rows[group.rank], bounds, order))
            == [None] * 3
        )
        for group in groups:
            others = count - (bounds[group.rank + 1] - bounds[group.rank])
            assert group.bytes_sent == len(order.nodes[group.rank]) * others * (4 if wire == "f32" else 2)
    if wire == "bf16":
        leaves = [leaf.bfloat16().float() for leaf in leaves]
    order.add_up(leaves)
    want = leaves[0] if wire == "f32" else leaves[0].bfloat16().float()
    for rank in range(3):
        assert torch.equal(
            rows[rank][0, bounds[rank] : bounds[rank + 1]], want[bounds[rank] : bounds[rank + 1]]
        )


def test_ranks_that_announce_different_operations_are_all_refused() -> None:
    with star(3) as (groups, serving):
        lengths = [10, 10, 11]
        errors = everyone(groups, lambda group: group.all_reduce(torch.ones(lengths[group.rank])))
        assert [type(error) for error in errors] == [ProtocolError] * 3
        assert all("rank 2" in str(error) for error in errors)
        assert isinstance(serving.exception(SECONDS), ProtocolError)


def test_a_rank_that_leaves_early_is_named() -> None:
    with star(3) as (groups, _):
        groups[1].close()
        errors = everyone([groups[0], groups[2]], lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(PeerLost, 1)] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    with star(3, timeout=0.5) as (groups, _):
        errors = everyone([groups[0], groups[2]], lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(GroupTimeout, 1)] * 2


def test_a_server_that_ends_is_missed() -> None:
    with star(2) as (groups, serving):
        everyone(groups, lambda group: group.barrier())
        groups[0]._data.shutdown(socket.SHUT_RDWR)  # to the server, rank 0 is gone
        assert isinstance(serving.exception(SECONDS), PeerLost)
        errors = everyone(groups, lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(PeerLost, 0)] * 2


def test_strangers_and_wrong_tokens_are_turned_away_from_a_star() -> None:
    server = StarServer(("127.0.0.1", 0), 1, SECONDS, token="right")
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve)
        rude = PlainWorker(server.address, join=False)
        rude.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert rude.is_closed()
        wrong = StarGroup.open(Seat(0, 1), server.address, SECONDS, "f32", "wrong")
        with pytest.raises(PeerLost):
            wrong.barrier()
        wrong.close()
        with StarGroup.open(Seat(0, 1), server.address, SECONDS, "f32", "right") as group:
            assert group.all_gather_bytes(b"x") == [b"x"]
        serving.result(SECONDS)


def test_closing_a_server_that_still_waits_ends_it() -> None:
    server = StarServer(("127.0.0.1", 0), 1, SECONDS)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server.serve)
        server.close()
        serving.result(SECONDS)


SERVE = """
import resource, sys, torch
from andon.group.star_server import StarServer
torch.set_num_threads(1)
server = StarServer(("127.0.0.1", 0), int(sys.argv[1]), 120.0)
print(server.address[1], flush=True)
server.serve()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
RANK = """
import sys, torch
from andon.group.star import SERVER, StarGroup
torch.set_num_threads(1)
rank, size, port, count = map(int, sys.argv[1:])
class Seat:
    world_size = size
Seat.rank = rank
flat = torch.arange(count, dtype=torch.float32).remainder_(1000.0) + rank
with StarGroup.open(Seat(), ("127.0.0.1", port), 120.0, "f32") as group:
    group.all_reduce(flat)
expected = torch.arange(count, dtype=torch.float32).remainder_(1000.0) * size + size * (size - 1) / 2
assert torch.equal(flat, expected)
"""


def test_the_ranks_of_a_killed_server_name_it() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVE, "2"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout
        address = ("127.0.0.1", int(server.stdout.readline()))
        groups = [StarGroup.open(Seat(rank, 2), address, SECONDS, "f32") for rank in range(2)]
        assert everyone(groups, lambda group: group.barrier()) == [None, None]
        server.kill()
        started = time.monotonic()
        errors = everyone(groups, lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(PeerLost, SERVER)] * 2
        assert time.monotonic() - started < 1.0
        for group in groups:
            group.close()
    finally:
        server.kill()
        server.communicate()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "megabytes"), [(2, 600), (8, 256)])
def test_large_vectors_pass_a_star_whose_server_stays_small(size: int, megabytes: int) -> None:
    python = [sys.executable, "-c"]
    server = subprocess.Popen([*python, SERVE, str(size)], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    port = server.stdout.readline().strip()
    count = str(megabytes * (1 << 18))
    ranks = [subprocess.Popen([*python, RANK, str(rank), str(size), port, count]) for rank in range(size)]
    try:
        assert [process.wait(500) for process in ranks] == [0] * size
        resident = int(server.stdout.readline())
        assert server.wait(SECONDS) == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        server.kill()
        server.wait()
    print(f"{size} x {megabytes} MB: server {resident} MB")
    assert resident < 700
