"""What every transport promises, tested on all of them with real processes.

The oracle is the plain sum in the one order (`Order.add_up` on whole rows). With bf16 on the wire the
contributions and every partial sum are rounded to bf16. A ring above two ranks adds in an
order of its own: there the result is the same on every rank and every time, and close to the sum.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import pytest
import torch

from andon.engine.gradients.order import Order, make_order
from andon.transport.base import Group, GroupError
from andon.transport.registry import TRANSPORTS
from andon.transport.rows import Wire
from tests.kit.group_harness import SIZES, World, busy, reach_barrier, world, worlds

HUGE = 10_000_000


def contribution(leaf: int, length: int) -> torch.Tensor:
    """The values of a leaf of an order, the same in all ranks."""
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * length + leaf))


def oracle(order: Order, length: int, wire: Wire) -> torch.Tensor:
    """The sum, plainly."""
    leaves = [contribution(leaf, length) for leaf in range(len(order.leaves))]
    if wire == "f32":
        order.add_up(leaves)
        return leaves[0]
    leaves = [leaf.bfloat16().float() for leaf in leaves]
    for into, other in order.adds:
        leaves[into] = (leaves[into] + leaves[other]).bfloat16().float()
    return leaves[0]


def rows_of_mine(group: Group, order: Order, length: int, allocated: bool) -> torch.Tensor:
    """My contribution, in memory of the group's or in plain memory."""
    mine = [contribution(leaf, length) for leaf, (rank, _) in enumerate(order.leaves) if rank == group.rank]
    wide = group.allocate(len(mine), length + 7) if allocated else torch.empty(len(mine), length + 7)
    return wide[:, 3 : 3 + length].copy_(torch.stack(mine))  # rows with a stride, as units of an arena are


def same_bits(group: Group, tensor: torch.Tensor) -> None:
    """Every rank holds the same bits."""
    digests = group.all_gather_bytes(hashlib.sha256(tensor.numpy().tobytes()).digest())
    assert len(set(digests)) == 1


def uneven(length: int, world_size: int) -> list[int]:
    """Bounds of parts of very different sizes, some empty."""
    return [0, *sorted(rank * rank * 7919 % (length + 1) for rank in range(world_size - 1)), length]


class Sums:
    """Compares with the oracle: bit by bit, or closely where a ring adds in its own order."""

    def __init__(self, transport: str, wire: Wire) -> None:
        self.transport, self.wire = transport, wire

    def check(self, group: Group, order: Order, got: torch.Tensor, part: slice = slice(None)) -> None:
        want = oracle(order, got.numel(), self.wire)[part]
        one_row_each = order.slots == group.world_size
        in_one_order = self.transport == "threads" or TRANSPORTS[self.transport].one_order
        if in_one_order or (one_row_each and group.world_size <= 2):
            assert torch.equal(got[part], want)
        else:
            tolerance = 1e-5 if self.wire == "f32" else 5e-2
            torch.testing.assert_close(got[part], want, rtol=tolerance, atol=tolerance)


def reduce_all_lengths(group: Group, sums: Sums) -> None:
    size = group.world_size
    for slots in (size, size + 3):
        order = make_order(slots, size)
        for length in sorted({0, 1, 3, size - 1, size, size + 1, 1023}):
            for allocated in (False, True):
                rows = rows_of_mine(group, order, length, allocated)
                group.all_reduce(rows, None if slots == size else order)
                sums.check(group, order, rows[0])
                same_bits(group, rows[0])
                again = rows_of_mine(group, order, length, allocated)
                group.all_reduce(again, order)
                assert torch.equal(again[0], rows[0])


def scatter_and_gather_unevenly(group: Group, sums: Sums) -> None:
    for slots in (group.world_size, group.world_size + 3):
        order = make_order(slots, group.world_size)
        for length in (0, 1, 7, 4099):
            bounds = uneven(length, group.world_size)
            mine = slice(bounds[group.rank], bounds[group.rank + 1])
            for allocated in (False, True):
                rows = rows_of_mine(group, order, length, allocated)
                group.reduce_scatter(rows, bounds, order)
                sums.check(group, order, rows[0], mine)
                whole = torch.full((length,), float("nan"))
                whole[mine] = torch.arange(length)[mine] + 0.1  # not a bf16 number: a gather is exact
                group.all_gather(whole, bounds)
                assert torch.equal(whole, torch.arange(length) + 0.1)


def reduce_huge(group: Group, sums: Sums) -> None:
    order = make_order(group.world_size, group.world_size)
    rows = rows_of_mine(group, order, HUGE, allocated=True)
    group.all_reduce(rows)
    same_bits(group, rows[0])
    if group.rank == 0:
        sums.check(group, order, rows[0])


def tell_everyone(group: Group) -> None:
    for source in range(group.world_size):
        flat = torch.arange(1000.0) * (group.rank + 1)
        group.broadcast(flat, source)
        assert torch.equal(flat, torch.arange(1000.0) * (source + 1))
    for length in (0, 1, 300, 200_000):
        messages = [bytes([rank]) * (length * rank) for rank in range(group.world_size)]
        assert group.all_gather_bytes(messages[group.rank]) == messages


def last_to_barrier(group: Group, last: int, seconds: float) -> tuple[float, float]:
    if group.rank == last:
        time.sleep(seconds)
    came = time.monotonic()
    group.barrier()
    return came, time.monotonic()


def reduce_until_failure(group: Group, victim: int, sign: signal.Signals) -> tuple[str, int, float]:
    """All-reduce on and on; in the fourth, the victim gets the signal. Seconds are since the third."""
    vector = group.allocate(1, 1_000_000)[0]
    fourth = threading.Event()

    def fall() -> None:
        fourth.wait()
        os.kill(os.getpid(), sign)

    if group.rank == victim:
        threading.Thread(target=fall, daemon=True).start()
    succeeded = time.monotonic()
    for turn in range(1_000_000):
        if turn == 3 and group.rank == victim:
            fourth.set()
        try:
            group.all_reduce(vector)
        except GroupError as error:
            seconds = time.monotonic() - succeeded
            return type(error).__name__, getattr(error, "rank", -1), seconds
        succeeded = time.monotonic()
    raise AssertionError("nobody fell")


def test_every_transport_is_in_the_table_of_this_suite() -> None:
    assert SIZES.keys() == TRANSPORTS.keys()


ROUNDED = [(name, size) for name, size in worlds(2, 3, 5, processes_only=True) if TRANSPORTS[name].connects]


@pytest.mark.parametrize(
    ("wire", "transport", "size"),
    [
        *(("f32", *each) for each in worlds(1, 2, 3, 5)),
        *(pytest.param("f32", *each, marks=pytest.mark.soak) for each in worlds(4)),
        *(("bf16", *each) for each in ROUNDED),
    ],
)
def test_sums_are_the_oracles(transport: str, size: int, wire: Wire) -> None:
    sums = Sums(transport, wire)
    with world(transport, size, wire) as ranks:
        ranks.run(reduce_all_lengths, sums)
        ranks.run(scatter_and_gather_unevenly, sums)
        ranks.run(tell_everyone)
        if size == 3 and wire == "f32":
            ranks.run(reduce_huge, sums)


@pytest.mark.parametrize(("transport", "size"), worlds(3))
def test_no_one_leaves_a_barrier_before_the_last_has_come(transport: str, size: int) -> None:
    with world(transport, size) as ranks:
        times = ranks.run(last_to_barrier, 1, 0.2)
        assert max(came for came, _ in times) <= min(left for _, left in times)


@pytest.mark.alone
@pytest.mark.parametrize(("transport", "size"), [*worlds(3, processes_only=True), ("shm", 2), ("ring", 2)])
def test_survivors_name_a_killed_peer_within_a_second(transport: str, size: int) -> None:
    victim = size - 2
    with World(transport, size, timeout=20.0) as ranks:
        outcomes = ranks.outcomes(reduce_until_failure, victim, signal.SIGKILL)
        assert outcomes.pop(victim).error == "Dead"
        for outcome in outcomes:
            name, rank, seconds = outcome.value
            assert (name, rank) == ("PeerLost", victim)
            assert seconds < 1.0 * busy()


@pytest.mark.parametrize(("transport", "size"), worlds(3, processes_only=True))
def test_survivors_name_a_stopped_peer_within_the_timeout(transport: str, size: int) -> None:
    victim = 1
    with World(transport, size, timeout=2.0) as ranks:
        ranks.run(reach_barrier)
        outcomes = ranks.outcomes(reduce_until_failure, victim, signal.SIGSTOP, silent=victim)
        assert outcomes.pop(victim).error == "Late"
        for outcome in outcomes:
            name, rank, seconds = outcome.value
            assert (name, rank) == ("GroupTimeout", victim)
            assert 1.9 < seconds < 3.0 * busy()


@pytest.mark.parametrize(("transport", "size"), worlds(2, processes_only=True))
def test_a_closed_group_leaves_nothing_behind(transport: str, size: int) -> None:
    with World(transport, size) as ranks:
        ranks.run(tell_everyone)
        assert ranks.close() == []
