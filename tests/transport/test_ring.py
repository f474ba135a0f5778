"""The ring: C-RING-001, and what is its own among the transports (see also `test_group_contract`)."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

import andon
from andon.engine.gradients.order import make_order, shares
from andon.transport.base import Group, GroupError, GroupTimeout, PeerLost, ProtocolError, Settings
from andon.transport.rows import Wire
from andon.transport.tcp.ring import RingGroup
from tests.kit.group_harness import World, busy, link_keys, reach_barrier

SECONDS = 20.0


class Table:
    """A rendezvous for threads: everyone leaves a value and takes all."""

    def __init__(self, size: int) -> None:
        self.values = [""] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)


class Seat:
    """One rank at the table."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.world_size = rank, len(table.values)
        self._table = table

    def exchange(self, topic: str, mine: str) -> list[str]:
        self._table.values[self.rank] = mine
        self._table.barrier.wait()
        return list(self._table.values)


@contextmanager
def ring(size: int, wire: Wire = "f32", timeout: float = SECONDS) -> Iterator[list[RingGroup]]:
    """The ranks of a ring, in this process, over real sockets."""
    table = Table(size)
    with ThreadPoolExecutor(size) as pool:
        seats = [Seat(table, rank) for rank in range(size)]
        groups = list(pool.map(lambda seat: RingGroup.open(seat, settings(seat, timeout, wire)), seats))
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def settings(seat: Seat, timeout: float = SECONDS, wire: Wire = "f32") -> Settings:
    """What a rank of a ring needs, keys included."""
    return Settings(timeout, wire, keys=link_keys(seat.rank, seat.world_size))


def everyone(groups: list[RingGroup], act: Callable[[RingGroup], Any]) -> list[Any]:
    """What came of it, by rank: a result or an exception."""
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(act, group) for group in groups]
        return [future.exception(SECONDS) or future.result(SECONDS) for future in futures]


def reduce_mine(data: list[torch.Tensor], group: RingGroup) -> None:
    group.all_reduce(data[group.rank])


def broadcast_mine(data: list[torch.Tensor], group: RingGroup) -> None:
    group.broadcast(data[group.rank], 1)


def vectors(size: int, length: int) -> list[torch.Tensor]:
    return [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("length", [0, 1, 3, 7, 1000, 1_000_003])
@pytest.mark.parametrize(("wire", "item"), [("f32", 4), ("bf16", 2)])
def test_a_rank_sends_its_part_of_the_vector_twice_round_and_not_a_byte_more(
    size: int, length: int, wire: Wire, item: int
) -> None:
    data = vectors(size, length)
    with ring(size, wire) as groups:
        assert everyone(groups, partial(reduce_mine, data)) == [None] * size
        sent = [group.bytes_sent for group in groups]
    bounds = shares(length, size)
    chunks = [hi - lo for lo, hi in pairwise(bounds)]
    for rank in range(size):
        left_out = chunks[rank] + chunks[(rank + 1) % size]  # one in each direction of the journey
        assert sent[rank] == item * (2 * length - left_out)
    assert sum(sent) == 2 * (size - 1) * length * item
    for other in data[1:]:
        assert torch.equal(other, data[0])


def mean_of_mine(data: list[torch.Tensor], group: RingGroup) -> None:
    andon.mean(group, data[group.rank])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [0, 1, 7, 100_003])
def test_the_mean_is_the_same_on_every_rank(size: int, length: int) -> None:  # C-RING-001
    data = [vector.view(-1, 1) for vector in vectors(size, length)]
    expected = torch.stack(data).double().mean(0)
    with ring(size) as groups:
        assert everyone(groups, partial(mean_of_mine, data)) == [None] * size
    assert all(torch.equal(each, data[0]) for each in data)
    torch.testing.assert_close(data[0].double(), expected, rtol=0, atol=1e-6)


def test_two_equal_vectors_are_their_own_mean_and_a_view_with_gaps_is_refused() -> None:
    data = [torch.tensor([1.0, -2.0, 3.5]) for _ in range(2)]
    with ring(2) as groups:
        everyone(groups, partial(mean_of_mine, data))
        assert data[1].tolist() == [1.0, -2.0, 3.5]
        with pytest.raises(ValueError, match="contiguous"):
            andon.mean(groups[0], torch.zeros(4, 4)[:, 1])


def test_two_ranks_get_the_sum_in_the_one_order() -> None:
    data = vectors(2, 1_000_001)
    expected = [row.clone() for row in data]
    make_order(2, 2).add_up(expected)
    with ring(2) as groups:
        everyone(groups, partial(reduce_mine, data))
    assert torch.equal(data[0], expected[0])
    assert torch.equal(data[1], expected[0])


def test_the_sum_of_integers_is_exact_at_every_size() -> None:
    for size in (2, 3, 5):
        data = [torch.arange(10_007, dtype=torch.float32) + rank for rank in range(size)]
        with ring(size) as groups:
            everyone(groups, partial(reduce_mine, data))
        expected = torch.arange(10_007, dtype=torch.float32) * size + size * (size - 1) / 2
        assert all(torch.equal(flat, expected) for flat in data)


def test_chunks_far_larger_than_the_socket_buffers_do_not_block() -> None:
    data = [torch.ones(8_000_000) for _ in range(3)]
    with ring(3) as groups:
        for group in groups:
            for sock in (group._left, group._right):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        assert everyone(groups, partial(reduce_mine, data)) == [None] * 3
    assert all(bool((flat == 3).all()) for flat in data)


@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("lengths", [[9, 0, 1, 0, 7], [0, 0, 0, 0, 20], [3, 3, 3, 3, 3]])
def test_parts_of_any_length_are_reduced_and_gathered(wire: Wire, lengths: list[int]) -> None:
    bounds = [0, *accumulate(100_001 * length for length in lengths)]
    data = [torch.full((bounds[-1],), float(rank)) for rank in range(5)]

    def reduce_and_gather(group: RingGroup) -> None:
        group.reduce_scatter(data[group.rank], bounds)
        group.all_gather(data[group.rank], bounds)

    with ring(5, wire) as groups:
        assert everyone(groups, reduce_and_gather) == [None] * 5
        with pytest.raises(ValueError, match="does not cut"):
            groups[0].all_gather(data[0], bounds[1:])
    assert all(bool((flat == 10).all()) for flat in data)


def test_other_types_travel_as_they_are() -> None:
    for dtype in (torch.int64, torch.bfloat16, torch.uint8, torch.float64):
        with ring(3, "bf16") as groups:
            flats = [torch.arange(9).add(group.rank).to(dtype) for group in groups]
            everyone(groups, partial(broadcast_mine, flats))
        assert all(torch.equal(flat, torch.arange(9).add(1).to(dtype)) for flat in flats)
        with ring(1) as groups, pytest.raises(ValueError, match="float32"):
            groups[0].all_reduce(flats[0])


def test_different_operations_are_refused_everywhere() -> None:
    with ring(3) as groups:
        lengths = [10, 10, 11]
        errors = everyone(groups, lambda group: group.all_reduce(torch.ones(lengths[group.rank])))
        assert all(isinstance(error, ProtocolError) for error in errors)
        # Rank 0 hears of it from rank 2, and rank 2 from rank 1, at the same time: either is told first.
        assert all("rank 2" in str(error) or "rank 1" in str(error) for error in errors)
        with pytest.raises(ProtocolError):
            groups[0].barrier()


def test_rubbish_from_a_neighbour_is_refused_everywhere() -> None:
    with ring(4) as groups:
        groups[1]._right.send(b"\xff" * 1000)
        errors = everyone([groups[0], groups[2], groups[3]], lambda group: group.barrier())
        assert [type(error) for error in errors] == [ProtocolError] * 3
        assert all("rank 1" in str(error) for error in errors)


def test_rubbish_on_a_watch_link_is_refused() -> None:
    for rubbish in (b"\xff" * 100, struct.pack(">I", 1) + b"\x99", struct.pack(">I", 1) + b"\x07"):
        with ring(3) as groups:
            groups[1]._detector.links[0].send(rubbish)
            errors = everyone([groups[0], groups[2]], lambda group: group.barrier())
            assert [type(error) for error in errors] == [ProtocolError] * 2
            assert all("rank 1" in str(error) for error in errors)


def test_a_rank_that_leaves_is_named_by_all() -> None:
    with ring(4) as groups:
        groups[2].close()
        errors = everyone([groups[0], groups[1], groups[3]], lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(PeerLost, 2)] * 3


@pytest.mark.alone
def test_a_rank_that_does_not_come_is_named_although_others_wait_for_their_neighbours() -> None:
    with ring(4, timeout=0.5) as groups:
        everyone(groups, lambda group: group.barrier())
        started = time.monotonic()
        errors = everyone([groups[0], groups[1], groups[3]], lambda group: group.barrier())
        assert [(type(error), error.rank) for error in errors] == [(GroupTimeout, 2)] * 3
        assert time.monotonic() - started < 2.0 * busy()


def test_strangers_do_not_hold_up_a_ring() -> None:
    table = Table(2)
    strangers: list[socket.socket] = []

    class Noisy(Seat):
        def exchange(self, topic: str, mine: str) -> list[str]:
            values = super().exchange(topic, mine)
            for value in values:
                host, port = value.split()
                silent, rude = (socket.create_connection((host, int(port))) for _ in range(2))
                rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
                strangers.extend([silent, rude])
            return values

    with ThreadPoolExecutor(2) as pool:
        seats = [Noisy(table, rank) for rank in range(2)]
        groups = list(pool.map(lambda seat: RingGroup.open(seat, settings(seat)), seats))
    assert everyone(groups, lambda group: group.all_gather_bytes(b"%d" % group.rank)) == [[b"0", b"1"]] * 2
    for group in groups:
        group.close()
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_never_connects_is_named() -> None:
    table = Table(2)

    def come(rank: int) -> BaseException | None:
        try:
            if rank == 0:
                RingGroup.open(Seat(table, 0), Settings(0.5, keys=link_keys(0, 2))).close()
            else:
                Seat(table, 1).exchange("ring", table_value)
        except GroupError as error:
            return error
        return None

    with socket.create_server(("127.0.0.1", 0)) as deaf, ThreadPoolExecutor(2) as pool:
        table_value = f"127.0.0.1 {deaf.getsockname()[1]}"
        error, _ = pool.map(come, range(2))
    assert isinstance(error, GroupTimeout)
    assert error.rank == 1


def reduce_until_failure(group: Group, victim: int, sign: signal.Signals, length: int) -> tuple[str, int, float]:
    """All-reduce on and on; the victim gets the signal in the middle of one. Seconds are since then."""
    vector = torch.ones(length)
    began = time.monotonic()
    for turn in range(1_000_000):
        if turn == 2 and group.rank == victim:
            threading.Timer(0.02, os.kill, (os.getpid(), sign)).start()
        try:
            began = time.monotonic()
            group.all_reduce(vector)
        except GroupError as error:
            return type(error).__name__, getattr(error, "rank", -1), time.monotonic() - began
    raise AssertionError("nobody fell")


@pytest.mark.alone
@pytest.mark.parametrize("victim", [0, 2])
def test_every_survivor_names_the_killed_rank_within_a_second(victim: int) -> None:
    with World("ring", 5, timeout=20.0) as ranks:
        outcomes = ranks.outcomes(reduce_until_failure, victim, signal.SIGKILL, 4_000_000)
        assert outcomes.pop(victim).error == "Dead"
        for outcome in outcomes:
            name, rank, seconds = outcome.value
            assert (name, rank) == ("PeerLost", victim)
            assert seconds < 1.0 * busy()


@pytest.mark.alone
def test_every_survivor_names_the_stopped_rank_within_the_timeout() -> None:
    with World("ring", 5, timeout=1.5) as ranks:
        ranks.run(reach_barrier)
        outcomes = ranks.outcomes(reduce_until_failure, 3, signal.SIGSTOP, 4_000_000, silent=3)
        assert outcomes.pop(3).error == "Late"
        for outcome in outcomes:
            name, rank, seconds = outcome.value
            assert (name, rank) == ("GroupTimeout", 3)
            assert seconds < 2.5 * busy()


def reduce_gigabyte(group: Group) -> None:
    flat = torch.arange(1 << 28, dtype=torch.float32).mul_(group.rank + 1.0)
    group.all_reduce(flat)
    flat -= torch.arange(1 << 28, dtype=torch.float32).mul_(6.0)
    assert bool((flat.abs() <= 512.0).all())  # beyond 2**24 a float is rounded to its last place, twice


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_gigabyte_goes_round_three_ranks() -> None:
    with World("ring", 3, timeout=60.0) as ranks:
        ranks.run(reduce_gigabyte, deadline=500.0)
