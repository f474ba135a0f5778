"""Shared memory: what the contract suite does not see."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from andon.engine.gradients.order import make_order
from andon.errors import UserError
from andon.transport.base import Group, GroupError, GroupTimeout, PeerLost, ProtocolError, Settings
from andon.transport.rows import Wire
from andon.transport.shm.group import ShmGroup
from andon.transport.shm.segment import STAGE_BYTES
from tests.kit.group_harness import World, busy
from tests.transport.test_group_contract import oracle, rows_of_mine

LONG = STAGE_BYTES // 4 * 3 + 17  # more than a staging area of floats


def reduce_views(group: Group, wire: Wire) -> None:
    """Sub-ranges of allocated rows, in all ranks or (the others are staged) in some."""
    order = make_order(group.world_size + 3, group.world_size)
    arena = group.allocate(order.rows(group.rank), LONG + 100)
    for start, length in ((0, 1), (3, 1000), (100, LONG)):
        for in_arena in (range(group.world_size), [0], [group.world_size - 1]):
            mine = rows_of_mine(group, order, length, allocated=False)
            if group.rank in in_arena:
                arena.fill_(7)
                rows = arena[: len(mine), start : start + length]
                rows.copy_(mine)
            else:
                rows = mine
            group.all_reduce(rows, order)
            assert torch.equal(rows[0], oracle(order, length, wire))
            if group.rank in in_arena:
                assert (arena[:, :start] == 7).all() and (arena[:, start + length :] == 7).all()


def gather_long(group: Group) -> None:
    """Parts longer than a staging area, from shared memory and from plain memory."""
    size, bounds = 4 * LONG, [0, LONG // 2, *[3 * LONG] * (group.world_size - 2), 4 * LONG]
    whole = torch.arange(size, dtype=torch.int32)
    for allocated in (True, False):
        flat = group.allocate(1, size)[0].view(torch.int32) if allocated else torch.empty_like(whole)
        flat.fill_(-1)
        lo, hi = bounds[group.rank], bounds[group.rank + 1]
        flat[lo:hi] = whole[lo:hi]
        group.all_gather(flat, bounds)
        assert torch.equal(flat, whole)


def reduce_many(group: Group, times: int) -> None:
    """Without a pause, so that fast ranks run into slow ones."""
    vectors = [group.allocate(1, 64)[0], torch.zeros(64)]
    for turn in range(times):
        vector = vectors[turn % 2].fill_(group.rank + turn)
        group.all_reduce(vector)
        total = group.world_size * turn + sum(range(group.world_size))
        assert (vector == total).all()
        assert group.all_gather_bytes(b"%d %d" % (turn, group.rank))[-1] == b"%d %d" % (turn, group.world_size - 1)


def reduce_on_the_gpu(group: Group, wire: Wire) -> None:
    """Ranks that share one GPU; the first contributes from memory of the host."""
    order = make_order(group.world_size + 3, group.world_size)
    for length in (0, 1, 1000, LONG):
        rows = rows_of_mine(group, order, length, allocated=True)
        rows = rows if group.rank == 0 else rows.cuda()
        group.all_reduce(rows, order)
        assert torch.equal(rows[0].cpu(), oracle(order, length, wire))
        group.broadcast(rows[0], 0)
        assert torch.equal(rows[0].cpu(), oracle(order, length, wire))


def near_the_end_of_the_counter(group: Group) -> None:
    assert isinstance(group, ShmGroup)
    group._barrier.turn = 0xFFFF_FFF0
    group._barrier._counters[group.rank] = 0xFFFF_FFF0


def disagree(group: Group, how: str) -> None:
    rank = group.rank
    if how == "length":
        group.all_reduce(torch.zeros(10 + rank))
    elif how == "operation":
        group.barrier() if rank else group.all_reduce(torch.zeros(10))
    else:
        group.all_reduce(torch.zeros(3, 10), make_order(group.world_size + rank, group.world_size))


def leave_early(group: Group) -> float:
    if group.rank == 0:
        group.close()
    started = time.monotonic()
    group.barrier()
    return started


def wait_long(group: Group, seconds: float) -> float:
    """Processor seconds that rank 0 spends while it waits for the others."""
    if group.rank:
        time.sleep(seconds)
    before = time.process_time()
    group.barrier()
    return time.process_time() - before


def fail_twice(group: Group) -> list[str]:
    errors = []
    for _ in range(2):
        try:
            group.barrier() if group.rank else time.sleep(1)
        except GroupTimeout as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("wire", ["f32", "bf16"])
def test_views_of_shared_rows_are_summed_in_place_and_nothing_around_them_changes(wire: Wire) -> None:
    with World("shm", 3, wire) as world:
        world.run(reduce_views, wire)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: tests/gpu.sh on a machine that has one")
@pytest.mark.parametrize("wire", ["f32", "bf16"])
def test_tensors_on_a_gpu_give_the_same_bits(wire: Wire) -> None:
    with World("shm", 3, wire) as world:
        world.run(reduce_on_the_gpu, wire)


def test_parts_longer_than_a_staging_area_are_gathered() -> None:
    with World("shm", 3) as world:
        world.run(gather_long)


def test_thousands_of_collectives_in_a_row_keep_step() -> None:
    with World("shm", 3) as world:
        world.run(reduce_many, 1500)


def test_the_counter_may_wrap_around() -> None:
    with World("shm", 2) as world:
        world.run(near_the_end_of_the_counter)
        world.run(reduce_many, 50)


@pytest.mark.parametrize("how", ["length", "operation", "order"])
def test_ranks_that_disagree_are_told_so(how: str) -> None:
    with World("shm", 2) as world:
        for outcome in world.outcomes(disagree, how):
            assert outcome.error == "ProtocolError"
            assert "rank 0" in outcome.message and "rank 1" in outcome.message


@pytest.mark.alone
def test_a_rank_that_leaves_is_lost_to_the_others_at_once() -> None:
    with World("shm", 3) as world:
        left, *others = world.outcomes(leave_early)
        assert left.error == "GroupError" and "has left" in left.message
        for outcome in others:
            assert outcome.error == "PeerLost" and "rank 0" in outcome.message
            assert outcome.seconds < 1.0 * busy()


@pytest.mark.alone
def test_a_long_wait_costs_hardly_any_processor_time() -> None:
    with World("shm", 2) as world:
        assert world.run(wait_long, 0.5)[0] < 0.1


def test_a_group_that_failed_fails_again_with_the_same_words() -> None:
    with World("shm", 2, timeout=0.2) as world:
        errors = world.run(fail_twice)[1]
        assert len(errors) == 2 and errors[0] == errors[1]


def test_no_segment_has_a_name() -> None:
    with World("shm", 2) as world:
        world.run(gather_long)
        assert not [path for path in Path("/dev/shm").iterdir() if "andon" in path.name]


class ElsewhereRendezvous:
    """Rank 0 of two; the other is on another machine."""

    rank, world_size = 0, 2

    def exchange(self, topic: str, mine: str) -> list[str]:
        return [mine, "another-machine 1 -1"]


def test_workers_of_two_machines_are_refused() -> None:
    with pytest.raises(UserError, match="one machine"):
        ShmGroup.open(ElsewhereRendezvous(), Settings(1.0))


def test_the_errors_are_one_family() -> None:
    assert all(issubclass(kind, GroupError) for kind in (PeerLost, GroupTimeout, ProtocolError))
