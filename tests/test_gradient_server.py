"""The gradient server and its workers: version 2 of the wire as others speak it (C-WIRE-002)."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from andon.engine.order import make_order
from andon.protocol2.client import ServerShutdown, WorkerClient
from andon.protocol2.messages import JoinRequest
from andon.protocol2.server import GradientServer, NonFiniteGradient
from andon.transport.base import GroupError, GroupTimeout, PeerLost, ProtocolError
from tests.plain_peers import SECONDS, PlainServer, PlainSocket, PlainWorker


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
        assert [(w.worker_id, w.node_id, w.gpu_count, w.backend) for w in server.workers] == [(0, "plain-0", 1, "cpu")]


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
    make_order(3, 3).add_up(expected)
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
    "an endless head": (
        lambda w: w.sock.sendall(struct.pack(">I", 90_000_000) + struct.pack("<BQIIII", 8, 7, 1, 0, 24, 20_000_000)),
        "80,000,025 bytes before its floats",
    ),
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
        (lambda w: w.send_non_block(1, 2, [1.0]), lambda s: s.collect_and_reduce_non_block(1, 0), "component 2"),
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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_halts_too(value: float) -> None:
    with session(2) as (server, workers):
        for worker in workers:
            worker.send_gradient(3, [1.0], value if worker.worker_id == 1 else 1.0, 1, 1)
        with pytest.raises(NonFiniteGradient, match=r"worker 1 .* step 3 .loss"):
            server.collect_and_reduce(3)


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


@pytest.mark.alone
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
def test_our_worker_refuses_what_it_did_not_ask_for(payload: bytes, error: type[GroupError], complaint: str) -> None:
    with (
        PlainServer(lambda plain: plain.send(payload)) as server,
        join(server) as client,
        pytest.raises(error, match=complaint),
    ):
        client.receive_averaged(6)


def test_our_worker_refuses_a_frame_above_the_cap() -> None:
    def conversation(plain: PlainSocket) -> None:
        plain.sock.sendall(struct.pack(">I", 100_000_001))

    with PlainServer(conversation) as server, join(server) as client, pytest.raises(ProtocolError, match="100,000,001"):
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
