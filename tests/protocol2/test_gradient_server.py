"""The gradient server and its workers: version 2 of the wire as others speak it (C-WIRE-002)."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from andon.protocol2.client import WorkerClient
from andon.protocol2.connections import WorkerGone
from andon.protocol2.mean import NonFiniteGradient, global_loss
from andon.protocol2.server import GradientServer, WorkersDisagree
from andon.protocol2.wire.dialogue import BLOCK, COMPONENT, Dialogue, Part
from andon.protocol2.wire.messages import JoinRequest
from andon.transport.base import GroupTimeout
from tests.kit.group_harness import busy
from tests.protocol2.plain_peers import SECONDS, PlainWorker, sequential_mean

pytestmark = pytest.mark.timeout(60)  # a server that waits for ever is noticed soon
Lost = list[WorkerGone]


@contextmanager
def session(
    count: int, dead_after: float = 30.0, lost: Lost | None = None
) -> Iterator[tuple[GradientServer, list[PlainWorker]]]:
    """A server and so many plain workers that have joined, in the order of their numbers."""
    lost = [] if lost is None else lost
    with (
        GradientServer(dead_after=dead_after, on_lost=lost.append) as server,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as stack,
    ):
        joining = pool.submit(server.wait_for_workers, count, SECONDS)
        workers = [PlainWorker(server.address, f"plain-{number}") for number in range(count)]
        for worker in workers:
            stack.callback(worker.sock.close)
        joining.result(SECONDS)
        yield server, workers


def test_a_server_listens_on_a_free_port_and_knows_nobody() -> None:
    with GradientServer() as server:
        assert server.address[1] > 0
        assert server.workers == []


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
        dialogue = Dialogue(0)
        server.send_shard_assignments(0, 101)
        assert [worker.shard() for worker in workers] == [(0, 0, 50), (0, 50, 101)]
        workers[0].send_gradient(0, [1.0, 2.0, -8.0], 0.5, 10, 25)
        workers[1].send_gradient(0, [2.0, 3.0, 8.0], 1.5, 20, 75)
        mean = server.collect(dialogue)
        assert mean.gradients.tolist() == [1.5, 2.5, 0.0]
        assert (mean.loss, mean.correct, mean.total, mean.workers) == (1.25, 30, 100, (0, 1))
        assert mean.wait_ms >= 0 and mean.reduce_ms >= 0
        server.broadcast(mean)
        for worker in workers:
            step, gradients, loss = worker.averaged()
            assert (step, gradients.tolist(), loss) == (0, [1.5, 2.5, 0.0], 1.25)
        server.shutdown_workers()
        for worker in workers:
            assert worker.receive() == b"\x07"


def test_blocks_in_reverse_order_and_then_components() -> None:
    with session(2) as (server, workers):
        dialogue = Dialogue()
        for step in (5, 6):
            for block in (1, 0):
                workers[0].send_block(step, block, [2, 1], [1.0, 2.0, 3.0], blocks=2)
                workers[1].send_block(step, block, [2, 1], [3.0, 4.0, 5.0], blocks=2)
                server.broadcast(server.collect(dialogue))
                for worker in workers:
                    *place, gradients = worker.averaged_block()
                    assert (place, gradients.tolist()) == ([step, block, [2, 1]], [2.0, 3.0, 4.0])
            for component in (0, 1, 2):
                for worker in workers:
                    worker.send_non_block(step, component, [float(worker.worker_id), 4.0])
                assert not dialogue.between_steps
                server.broadcast(server.collect(dialogue))
                for worker in workers:
                    *place, gradients = worker.averaged_non_block()
                    assert (place, gradients.tolist()) == ([step, component], [0.5, 4.0])
            assert dialogue.between_steps


def test_the_mean_is_added_worker_by_worker_from_zero() -> None:
    """The bits of the original, for a number of workers at which the tree of `engine.gradients.order` gives others."""
    dice = np.random.default_rng(1)
    rows = [dice.standard_normal(300_001).astype(np.float32) for _ in range(5)]
    for row in rows:
        row[:2] = -0.0
    with session(5) as (server, workers), ThreadPoolExecutor(5) as pool:
        for worker, row in zip(workers, rows, strict=True):
            pool.submit(worker.send_gradient, 4, row, 1.0, 1, 1)
        mean = server.collect(Dialogue()).gradients
    assert mean.tobytes() == sequential_mean(rows).tobytes()
    assert not np.signbit(mean[:2]).any()
    in_pairs = (((rows[0] + rows[1]) + (rows[2] + rows[3])) + rows[4]) / np.float32(5)
    assert mean.tobytes() != in_pairs.tobytes()


def test_the_loss_is_added_in_single_precision() -> None:
    losses = [(0.1, 3), (0.7, 16_777_217), (1e-3, 5)]
    total = np.float32(0)
    for loss, count in losses:
        total += np.float32(loss) * np.float32(count)
    found = global_loss(dict(enumerate(losses)), 0)
    assert found == float(total / np.float32(16_777_225))
    assert found != sum(float(np.float32(loss)) * count for loss, count in losses) / 16_777_225
    assert global_loss({}, 0) == global_loss({0: (3.0, 0)}, 0) == 0.0


def test_no_samples_make_no_loss() -> None:
    with session(1) as (server, (worker,)):
        worker.send_gradient(0, [], 3.0, 0, 0)
        mean = server.collect(Dialogue())
        assert (mean.loss, mean.total, len(mean.gradients)) == (0.0, 0, 0)


def test_a_worker_may_send_before_all_have_joined() -> None:
    with GradientServer() as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(server.wait_for_workers, 2, SECONDS)
        early = PlainWorker(server.address)
        early.send_block(0, 0, [1], [1.0], blocks=1)
        late = PlainWorker(server.address)
        joining.result(SECONDS)
        late.send_block(0, 0, [1], [3.0], blocks=1)
        server.broadcast(server.collect(Dialogue()))
        for worker in (early, late):
            assert worker.averaged_block()[3].tolist() == [2.0]
            worker.sock.close()


def test_the_place_of_a_worker_that_leaves_before_all_have_joined_is_free_again() -> None:
    with GradientServer() as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(server.wait_for_workers, 3, SECONDS)
        workers = [PlainWorker(server.address) for _ in range(2)]
        workers[0].sock.close()
        until = time.monotonic() + SECONDS
        while len(server.workers) > 1 and time.monotonic() < until:
            time.sleep(0.01)
        workers += [PlainWorker(server.address) for _ in range(2)]
        joining.result(SECONDS)
        assert [worker.worker_id for worker in workers] == [0, 1, 0, 2]
        for worker in workers:
            worker.sock.close()


def test_heartbeats_are_welcome_at_any_point() -> None:
    with session(2) as (server, workers):
        dialogue = Dialogue()
        for worker in workers:
            worker.beat()
        workers[0].beat()
        for worker in workers:
            worker.send_gradient(0, [1.0], 1.0, 1, 1)
            worker.beat()
        server.broadcast(server.collect(dialogue))
        for worker in workers:
            worker.send_gradient(1, [1.0], 1.0, 1, 1)
        assert server.collect(dialogue).gradients.tolist() == [1.0]


def test_a_worker_may_send_ahead_and_gets_its_means_in_order() -> None:
    with session(2) as (server, workers):
        dialogue = Dialogue()
        for step in range(4):
            workers[0].send_gradient(step, [float(step)], 1.0, 1, 1)
        for step in range(4):
            workers[1].send_gradient(step, [0.0], 1.0, 1, 1)
            server.broadcast(server.collect(dialogue))
            assert workers[1].averaged()[1].tolist() == [step / 2]
        assert [workers[0].averaged()[0] for _ in range(4)] == [0, 1, 2, 3]


Spoil = Callable[[PlainWorker], None]
SPOILS: dict[str, tuple[Spoil, str]] = {
    "another step": (lambda w: w.send_gradient(8, [1.0], 1.0, 1, 1), "step 8 where 7 was expected"),
    "another message": (lambda w: w.send_block(7, 23, [1], [1.0]), "block 23 where whole vector was expected"),
    "a message for workers": (lambda w: w.send(b"\x07"), "Shutdown where a gradient was expected"),
    "another worker's number": (
        lambda w: w.send(struct.pack("<BQIQffQQ", 4, 7, 0, 1, 1.0, 1.0, 1, 1)),
        "it calls itself worker 0",
    ),
    "another length": (lambda w: w.send_gradient(7, [1.0, 2.0], 1.0, 1, 1), "2 floats where the others sent"),
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
    lost: Lost = []
    with session(3, lost=lost) as (server, workers):
        dialogue = Dialogue(7)
        for worker in workers:
            if worker.worker_id != 1:
                worker.send_gradient(7, [3.0], 1.0, 1, 1)
        act(workers[1])
        mean = server.collect(dialogue)
        assert [(gone.worker.worker_id, gone.cause) for gone in lost] == [(1, "protocol")]
        assert complaint in str(lost[0]) and "worker 1 (plain-1 at 127.0.0.1)" in str(lost[0])
        assert (mean.gradients.tolist(), mean.workers) == ([3.0], (0, 2))
        server.broadcast(mean)
        assert workers[1].is_closed()
        assert [worker.worker_id for worker in server.workers] == [0, 2]
        server.send_shard_assignments(8, 10)
        for worker in (workers[0], workers[2]):
            worker.averaged()
        assert [workers[0].shard(), workers[2].shard()] == [(8, 0, 5), (8, 5, 10)]
        workers[0].send_gradient(8, [1.0], 1.0, 1, 1)
        workers[2].send_gradient(8, [2.0], 1.0, 1, 1)
        assert server.collect(dialogue).gradients.tolist() == [1.5]


@pytest.mark.parametrize(
    ("send", "expected", "complaint"),
    [
        (lambda w: w.send_block(1, 5, [1], [1.0]), Part(BLOCK, 1, 4), "block 5 where block 4 was expected"),
        (lambda w: w.send_block(1, 4, [2], [1.0]), Part(BLOCK, 1, 4), "sizes for 2 of 1 floats"),
        (lambda w: w.send_block(2, 4, [1], [1.0]), Part(BLOCK, 1, 4), "step 2 where 1 was expected"),
        (lambda w: w.send_block(1, 4, [1], [1.0], blocks=4), Part(BLOCK, 1, 4), "block 4 of 4"),
        (lambda w: w.send_non_block(1, 2, [1.0]), Part(COMPONENT, 1, 0), "component 2 where component 0 was expected"),
        (lambda w: w.send_non_block(3, 0, [1.0]), Part(COMPONENT, 1, 0), "step 3 where 1 was expected"),
        (lambda w: w.send_non_block(1, 3, [1.0]), Part(COMPONENT, 1, 0), "component 3 where 0, 1 or 2 was expected"),
        (lambda w: w.send_gradient(1, [1.0], 1.0, 1, 1), Part(BLOCK, 1, 4), "whole vector where block 4 was expected"),
        (lambda w: w.send_block(1, 4, [1], [1.0]), None, "block 4 cannot begin a step"),
        (lambda w: w.send_non_block(1, 1, [1.0]), None, "component 1 cannot begin a step"),
    ],
)
def test_a_part_that_does_not_come_now_is_refused(send: Spoil, expected: Part | None, complaint: str) -> None:
    dialogue = Dialogue()
    if expected and expected.tag == BLOCK:
        dialogue.advance(Part(BLOCK, expected.step, expected.index + 1, 24))
    elif expected:
        dialogue.advance(Part(BLOCK, expected.step, 0, 24))
    with session(1) as (server, (worker,)):
        send(worker)
        with pytest.raises(WorkerGone, match=complaint):
            server.collect(dialogue)


def test_an_unequal_pair_is_not_settled_by_blaming_one_of_them() -> None:
    lost: Lost = []
    with session(2, lost=lost) as (server, workers):
        workers[0].send_gradient(0, [1.0, 2.0], 1.0, 1, 1)
        workers[1].send_gradient(0, [1.0], 1.0, 1, 1)
        with pytest.raises(WorkersDisagree, match=r"worker 0: .* 2 floats; worker 1: .* 1 floats"):
            server.collect(Dialogue())
        assert len(server.workers) == 2 and not lost


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_halts_and_names_worker_step_and_place(value: float) -> None:  # F-DP-003
    with session(2) as (server, workers):
        workers[1].send_gradient(3, [1.0] * 199_999 + [value], 1.0, 1, 1)
        with pytest.raises(NonFiniteGradient, match=r"halt: worker 1 .* step 3") as caught:
            server.collect(Dialogue())  # at once, while the other still computes
        assert (caught.value.rank, caught.value.step, caught.value.where) == (1, 3, "whole vector")
        assert (caught.value.flaw.count, caught.value.flaw.first) == (1, 199_999)
    for tag, name in ((BLOCK, "block 2"), (COMPONENT, "component 1")):
        with session(2) as (server, workers):
            dialogue = Dialogue()
            dialogue.advance(Part(BLOCK, 4, 3, 24) if tag == BLOCK else Part(COMPONENT, 4, 0))
            for worker in workers:
                mine = [value if worker.worker_id == 0 else 1.0]
                worker.send_block(4, 2, [1], mine) if tag == BLOCK else worker.send_non_block(4, 1, mine)
            with pytest.raises(NonFiniteGradient, match=rf"worker 0 .* step 4 .{name}"):
                server.collect(dialogue)


def test_a_sum_that_overflows_halts_and_names_the_worker_at_which_it_did() -> None:
    with session(3) as (server, workers):
        for worker in workers:
            worker.send_gradient(2, [1.0, 2e38], 1.0, 1, 1)
        with pytest.raises(NonFiniteGradient, match=r"worker 1 makes the sum .* non-finite at step 2") as caught:
            server.collect(Dialogue())
        assert (caught.value.flaw.first, caught.value.flaw.kind) == (1, "Inf")


@pytest.mark.parametrize(
    ("losses", "complaint"),
    [
        ((float("nan"), 1.0), "worker 0 sent a non-finite gradient"),
        ((float("inf"), 1.0), "worker 0 sent a non-finite gradient"),
        ((3e38, 1.0), "worker 0 makes the mean loss non-finite"),  # times 100 samples
        ((2e36, 2e36, 1.0), "worker 1 makes the mean loss non-finite"),
    ],
)
def test_a_loss_that_is_not_finite_halts_too(losses: tuple[float, ...], complaint: str) -> None:
    with session(len(losses)) as (server, workers):
        for worker, loss in zip(workers, losses, strict=True):
            worker.send_gradient(3, [1.0], loss, 1, 100)
        with pytest.raises(NonFiniteGradient, match=rf"{complaint} at step 3 .loss"):
            server.collect(Dialogue())


def test_a_worker_that_breaks_off_in_the_middle_is_lost_and_the_others_get_their_mean() -> None:
    lost: Lost = []
    with session(2, lost=lost) as (server, workers):
        dialogue = Dialogue()
        workers[0].send_gradient(0, [1.0] * 100_000, 1.0, 1, 1)
        workers[1].sock.sendall(struct.pack(">IBQIQ", 33 + 400_000, 4, 0, 1, 100_000)[:20])
        workers[1].sock.close()
        mean = server.collect(dialogue)
        assert (mean.workers, len(mean.gradients)) == ((0,), 100_000)
        assert [(gone.worker.worker_id, gone.cause) for gone in lost] == [(1, "lost")]
        server.broadcast(mean)
        workers[0].send_gradient(1, [2.0], 1.0, 1, 1)
        assert server.collect(dialogue).gradients.tolist() == [2.0]


@pytest.mark.alone
@pytest.mark.parametrize("has_sent", [False, True])
def test_a_death_is_reported_while_the_others_compute(has_sent: bool) -> None:
    times: list[float] = []
    with session(3) as (server, workers), ThreadPoolExecutor(1) as pool:
        server._on_lost = lambda gone: times.append(time.monotonic())
        collecting = pool.submit(server.collect, Dialogue())
        if has_sent:
            workers[1].send_gradient(0, [1.0] * 1_000_000, 1.0, 1, 1)
        time.sleep(0.3)
        died = time.monotonic()
        workers[1].sock.close()
        time.sleep(0.5)
        assert len(times) == 1 and times[0] - died < 0.3 * busy() and not collecting.done()
        for worker in (workers[0], workers[2]):
            worker.send_gradient(0, [2.0], 1.0, 1, 1)
        assert collecting.result(SECONDS).workers == (0, 2)


@pytest.mark.alone
def test_only_a_worker_of_ours_is_given_up_for_its_silence() -> None:
    lost: Lost = []
    with GradientServer(dead_after=0.4, heartbeat=0.1, on_lost=lost.append) as server, ThreadPoolExecutor(2) as pool:
        joining = pool.submit(server.wait_for_workers, 3, SECONDS)
        plain = PlainWorker(server.address)
        silent = WorkerClient(server.address, JoinRequest("silent", 0, "cpu"), heartbeat=0.0)
        beating = WorkerClient(server.address, JoinRequest("beating", 0, "cpu"), heartbeat=0.1)
        joining.result(SECONDS)
        collecting = pool.submit(server.collect, Dialogue())
        time.sleep(1.5)
        assert [(gone.worker.node_id, gone.cause) for gone in lost] == [("silent", "stalled")]
        averaging = pool.submit(beating.average, 0, np.ones(3, np.float32), (1.0, 1, 1))
        plain.send_gradient(0, [3.0] * 3, 1.0, 1, 1)
        server.broadcast(collecting.result(SECONDS))
        assert averaging.result(SECONDS)[0].tolist() == [2.0] * 3
        assert list(beating.lost) == [silent.worker_id]
        assert plain.averaged()[0] == 0
        for each in (plain.sock, silent, beating):
            each.close()


@pytest.mark.alone
def test_a_frame_that_has_begun_must_go_on() -> None:
    lost: Lost = []
    with session(2, dead_after=0.3, lost=lost) as (server, workers):
        workers[0].send_gradient(0, [1.0], 1.0, 1, 1)
        workers[1].sock.sendall(struct.pack(">IB", 50, 4))
        assert server.collect(Dialogue()).workers == (0,)
        assert [(gone.worker.worker_id, gone.cause) for gone in lost] == [(1, "stalled")]


@pytest.mark.alone
def test_a_worker_that_reads_too_slowly_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andon.protocol2.worker.MIN_BYTES_PER_SECOND", 1e9)
    lost: Lost = []
    big = np.ones(4_000_000, np.float32)  # more than the kernel holds for a worker that does not read
    with session(2, dead_after=0.5, lost=lost) as (server, workers), ThreadPoolExecutor(3) as pool:
        dialogue = Dialogue()
        for worker in workers:
            pool.submit(worker.send_gradient, 0, big, 1.0, 1, 1)
        reading = pool.submit(workers[0].averaged)
        server.broadcast(server.collect(dialogue))
        assert [(gone.worker.worker_id, gone.cause, gone.detail) for gone in lost] == [
            (1, "stalled", "it reads too slowly")
        ]
        assert reading.result(SECONDS)[0] == 0
        workers[0].send_gradient(1, [2.0], 1.0, 1, 1)
        assert server.collect(dialogue).workers == (0,)


@pytest.mark.alone
def test_what_waits_behind_a_mean_has_its_time() -> None:
    """A worker that is busy before it reads its mean is not dropped for a short message that came meanwhile."""
    lost: Lost = []
    big = np.ones(4_000_000, np.float32)
    with GradientServer(dead_after=1.5, on_lost=lost.append) as server, ThreadPoolExecutor(3) as pool:
        joining = pool.submit(server.wait_for_workers, 2, SECONDS)
        ours, other = PlainWorker(server.address, join=False), PlainWorker(server.address)
        ours.send(struct.pack("<BI", 1, 1) + b"n" + struct.pack("<II", 1, 9) + b"cpu+andon")
        joining.result(SECONDS)
        assert ours.receive()[0] == 0x40
        _, ours.worker_id, _ = struct.unpack("<BII", ours.receive())
        for worker in (ours, other):
            pool.submit(worker.send_gradient, 0, big, 1.0, 1, 1)
        sending = pool.submit(lambda: server.broadcast(server.collect(Dialogue())))
        other.averaged()
        other.sock.close()
        for _ in range(25):
            time.sleep(0.1)
            ours.beat()
        tags = (ours.receive()[0] for _ in itertools.count())
        assert list(itertools.islice((tag for tag in tags if tag != 6), 2)) == [5, 0x41]
        sending.result(SECONDS)
        assert [gone.worker.worker_id for gone in lost] == [other.worker_id]
        ours.sock.close()


def test_an_empty_piece_is_refused() -> None:
    with session(1) as (server, (worker,)):
        head = struct.pack("<BQIBIIIQQ", 0x43, 0, 0, 4, 0, 0, 0, 0, 10)
        worker.send(head + struct.pack("<QfQQ", 0, 1.0, 1, 1))
        with pytest.raises(WorkerGone, match="a piece of 0 floats at 0 of 10"):
            server.collect(Dialogue())


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
