"""C-ZERO-001, the arithmetic: shards complete, disjoint and within one; unit owners balanced by
parameters."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.engine.gradients.order import shares
from andon.model.shape import SHAPES
from andon.optim.shard_map import Policy, UnitOwners

POLICIES: tuple[Policy, ...] = ("round_robin", "contiguous")


@pytest.mark.parametrize("world", range(1, 17))
def test_for_every_total_the_shards_are_complete_disjoint_and_within_one(world: int) -> None:
    for total in range(2001):
        bounds = shares(total, world)
        assert len(bounds) == world + 1 and bounds[0] == 0 and bounds[-1] == total
        sizes = [hi - lo for lo, hi in pairwise(bounds)]
        assert min(sizes) >= 0 and max(sizes) - min(sizes) <= 1


def test_round_robin_deals_blocks_in_turn() -> None:
    owners = UnitOwners.of("round_robin", [1] * 24, [], 4)
    assert owners.blocks == (0, 1, 2, 3) * 6
    assert owners.parameters == (6, 6, 6, 6)


def test_contiguous_gives_runs_of_blocks() -> None:
    assert UnitOwners.of("contiguous", [1] * 10, [], 3).blocks == (0, 0, 0, 0, 1, 1, 1, 2, 2, 2)


def test_what_is_no_block_goes_to_the_rank_that_owns_least() -> None:
    owners = UnitOwners.of("contiguous", [10, 10, 10], [8, 1, 9], 2)  # two blocks and one
    assert owners.others == (1, 0, 1)  # 9 where there are 10, 8 where there are 19, 1 where there are 20
    assert owners.parameters == (21, 27)


@given(st.lists(st.integers(0, 50), max_size=12), st.lists(st.integers(0, 50), max_size=4), st.integers(1, 6))
def test_every_unit_has_exactly_one_owner(blocks: list[int], others: list[int], world: int) -> None:
    for policy in POLICIES:
        owners = UnitOwners.of(policy, blocks, others, world)
        assert (len(owners.blocks), len(owners.others)) == (len(blocks), len(others))
        owned = [0] * world
        for owner, size in zip(owners.blocks + owners.others, [*blocks, *others], strict=True):
            owned[owner] += size
        assert tuple(owned) == owners.parameters


def test_the_350m_model_is_balanced_by_parameters() -> None:
    shape = SHAPES["350m"]
    embedding = shape.vocab * shape.hidden
    blocks = [shape.block_parameters] * shape.layers
    owners = UnitOwners.of("contiguous", blocks, [embedding, shape.hidden, embedding], 4)
    assert max(owners.parameters) / shape.parameters < 0.30
