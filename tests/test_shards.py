"""C-ZERO-001, the arithmetic: shards complete, disjoint and within one; maps balanced by parameters."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.optim.shard_map import OptimizerShard, ShardMap


@pytest.mark.parametrize("world", range(1, 17))
def test_for_every_total_the_shards_are_complete_disjoint_and_within_one(world: int) -> None:
    for total in range(2001):
        found = [OptimizerShard.for_rank(rank, world, total) for rank in range(world)]
        assert found[0].start == 0 and found[-1].stop == total
        assert all(a.stop == b.start for a, b in pairwise(found))
        sizes = [shard.size for shard in found]
        assert max(sizes) - min(sizes) <= 1


def test_the_arithmetic_of_memory() -> None:
    shard = OptimizerShard.for_rank(0, 4, 1_000_000)
    assert shard.savings == pytest.approx(0.75)
    assert shard.full_memory_bytes == 8_000_000
    assert shard.memory_bytes == 2_000_000
    assert shard.owns(0) and shard.owns(249_999) and not shard.owns(250_000)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank 4 among 4"):
        OptimizerShard.for_rank(4, 4, 100)


def test_round_robin_deals_blocks_in_turn() -> None:
    owners = ShardMap.round_robin([1] * 24, [], 4)
    assert owners.blocks_of(0) == [0, 4, 8, 12, 16, 20]
    assert owners.fraction_of(0) == pytest.approx(0.25)


def test_contiguous_gives_runs_of_blocks() -> None:
    assert ShardMap.contiguous([1] * 24, [], 4).blocks_of(1) == [6, 7, 8, 9, 10, 11]
    uneven = ShardMap.contiguous([1] * 10, [], 3)
    assert [len(uneven.blocks_of(rank)) for rank in range(3)] == [4, 3, 3]


def test_what_is_no_block_goes_to_the_least_loaded_rank() -> None:
    owners = ShardMap.contiguous([10, 10, 10], [8, 1, 9], 2)  # two blocks and one
    assert owners.other_owners == (
        1,
        0,
        1,
    )  # 9 where there are 10, 8 where there are 19, 1 where there are 20
    assert [owners.parameters_of(rank) for rank in (0, 1)] == [21, 27]


@given(st.lists(st.integers(0, 50), max_size=12), st.lists(st.integers(0, 50), max_size=4), st.integers(1, 6))
def test_every_map_gives_every_unit_to_exactly_one_rank(
    blocks: list[int], others: list[int], world: int
) -> None:
    for make in (ShardMap.round_robin, ShardMap.contiguous):
        owners = make(blocks, others, world)
        assert sum(owners.parameters_of(rank) for rank in range(world)) == sum(blocks) + sum(others)
        assert sorted(block for rank in range(world) for block in owners.blocks_of(rank)) == list(
            range(len(blocks))
        )
        if sum(blocks) + sum(others):
            assert sum(owners.fraction_of(rank) for rank in range(world)) == pytest.approx(1)


def test_the_fractions_of_the_350m_model_are_by_parameters() -> None:
    from andon.model.shape import SHAPES

    shape = SHAPES["350m"]
    embedding = shape.vocab * shape.hidden
    owners = ShardMap.contiguous(
        [shape.block_parameters] * shape.layers, [embedding, shape.hidden, embedding], 4
    )
    assert max(owners.fraction_of(rank) for rank in range(4)) < 0.30
