"""A rank that has no slots contributes nothing, whatever its buffer held before."""

from __future__ import annotations

import pytest
import torch

from andon.engine.gradients.order import order_of_ranges
from andon.transport.base import Group
from tests.kit.group_harness import World

SIZE = 3000


def sum_without_rank_1(group: Group) -> list[float]:
    """Ranks 0 and 2 have two slots each, rank 1 has none and rubbish in its row: the sum's distinct values."""
    order = order_of_ranges(4, (0, 2, 2, 4))
    row = torch.full((1, SIZE), float("nan") if group.rank == 1 else group.rank + 1.0)
    group.all_reduce(row, order)
    return sorted(set(row[0].tolist()))


@pytest.mark.parametrize("transport", ["shm", "star", "ring", "torch"])
def test_a_rank_without_slots_adds_nothing(transport: str) -> None:
    with World(transport, 3) as world:
        assert world.run(sum_without_rank_1) == [[4.0]] * 3
