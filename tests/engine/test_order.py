"""The order of addition: for every S and W the ranks' nodes add up to the one-worker tree, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from andon.engine.gradients.order import MOST_SLOTS, Order, cover, make_order, middle, order_of_ranges, shares

RNG = np.random.default_rng(7)
VALUES = (RNG.standard_normal(64) * 10.0 ** RNG.integers(-6, 6, 64)).astype(np.float32)


class Value:
    """A float32 that adds in place and remembers the shape of the sum."""

    def __init__(self, value: np.float32) -> None:
        self.value = value

    def add_(self, other: Value, /) -> None:
        self.value = np.float32(self.value + other.value)


def tree_sum(lo: int, hi: int) -> np.float32:
    """The definition, as plainly as it can be written."""
    if hi - lo == 1:
        return np.float32(VALUES[lo])
    mid = middle(lo, hi)
    return np.float32(tree_sum(lo, mid) + tree_sum(mid, hi))


def fold(order: Order, rank: int) -> list[Value]:
    """Run a rank's folds on plain floats, as the gradients do on buffers."""
    rows = [Value(np.float32(np.nan)) for _ in range(order.rows(rank))]
    for step in order.folds(rank):
        if step.accumulate:
            rows[step.row].add_(Value(VALUES[step.slot]))
        else:
            rows[step.row] = Value(VALUES[step.slot])
        for into, other in step.merges:
            rows[into].add_(rows[other])
    return rows[: len(order.nodes[rank])]


@pytest.mark.parametrize("slots", range(1, 65))
def test_every_world_size_adds_up_to_the_one_worker_sum(slots: int) -> None:
    expected = tree_sum(0, slots)
    for world in range(1, slots + 1):
        order = make_order(slots, world)
        leaves = [value for rank in range(world) for value in fold(order, rank)]
        assert len(leaves) == len(order.leaves)
        order.add_up(leaves)
        assert leaves[0].value.tobytes() == expected.tobytes(), (slots, world)


def test_uneven_ranges_left_by_a_lost_worker_add_up_too() -> None:
    for bounds in [(0, 5, 5, 16), (0, 1, 2, 16), (0, 0, 16), (0, 7, 9, 13, 16)]:
        order = order_of_ranges(16, bounds)
        leaves = [value for rank in range(order.world_size) for value in fold(order, rank)]
        order.add_up(leaves)
        assert leaves[0].value.tobytes() == tree_sum(0, 16).tobytes()


def test_powers_of_two_give_one_node_per_worker() -> None:
    for slots, world in [(8, 1), (8, 2), (8, 4), (8, 8), (64, 16)]:
        assert all(len(nodes) == 1 for nodes in make_order(slots, world).nodes)


def test_a_worker_needs_few_buffers() -> None:
    assert [make_order(slots, 1).rows(0) for slots in (1, 2, 4, 8, 16, 64)] == [1, 1, 2, 3, 4, 6]


def test_slots_of_a_step_are_disjoint_and_complete() -> None:  # C-SHARD-001
    for slots in range(1, 65):
        for world in range(1, slots + 1):
            order = make_order(slots, world)
            seen = [slot for rank in range(world) for slot in order.range_of(rank)]
            assert seen == list(range(slots))
            sizes = [len(order.range_of(rank)) for rank in range(world)]
            assert max(sizes) - min(sizes) <= 1


def test_cover_takes_the_largest_nodes() -> None:
    assert cover(0, 3, 8) == [(0, 2), (2, 3)]
    assert cover(3, 6, 8) == [(3, 4), (4, 6)]
    assert cover(0, 8, 8) == [(0, 8)]
    assert cover(4, 4, 8) == []


def test_shares_are_complete_and_within_one_grain() -> None:
    for total in (0, 1, 5, 1023, 1024, 5000):
        for world in range(1, 8):
            for grain in (1, 64, 1024):
                bounds = shares(total, world, grain)
                assert bounds[0] == 0 and bounds[-1] == total and bounds == sorted(bounds)
                assert all(bound % grain == 0 for bound in bounds[:-1])


def test_more_workers_than_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="5 workers cannot share 4 slots"):
        make_order(4, 5)
    with pytest.raises(ValueError, match="65537 slots are more than 65536"):
        make_order(MOST_SLOTS + 1, 5)


class Term:
    """A sum, written out."""

    def __init__(self, text: str) -> None:
        self.text = text

    def add_(self, other: Term, /) -> None:
        self.text = f"({self.text}+{other.text})"


TREES = {
    1: "0",
    2: "(0+1)",
    3: "((0+1)+2)",
    4: "((0+1)+(2+3))",
    5: "(((0+1)+(2+3))+4)",
    6: "(((0+1)+(2+3))+(4+5))",
    7: "(((0+1)+(2+3))+((4+5)+6))",
    9: "((((0+1)+(2+3))+((4+5)+(6+7)))+8)",
}


@pytest.mark.parametrize("slots", TREES)
def test_the_tree_splits_after_the_largest_power_of_two(slots: int) -> None:
    leaves = [Term(str(slot)) for slot in range(slots)]
    make_order(slots, slots).add_up(leaves)
    assert leaves[0].text == TREES[slots]


@pytest.mark.parametrize("slots", TREES)
def test_one_worker_folds_its_slots_into_the_same_tree(slots: int) -> None:
    order = make_order(slots, 1)
    rows = [Term("nothing") for _ in range(order.rows(0))]
    for step in order.folds(0):
        if step.accumulate:
            rows[step.row].add_(Term(str(step.slot)))
        else:
            rows[step.row] = Term(str(step.slot))
        for into, other in step.merges:
            rows[into].add_(rows[other])
    order.add_up(rows[: len(order.nodes[0])])
    assert rows[0].text == TREES[slots]
