"""The group of one worker: nothing to exchange, the rows are still added in the one order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from andon.group.base import Group, one_node_each, rows_of
from andon.order import Order


class LocalGroup(Group):
    """World size one."""

    rank = 0
    world_size = 1

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        order = order or one_node_each(1)
        order.add_up(rows_of(nodes, order, 0))

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        pass

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def close(self) -> None:
        pass
