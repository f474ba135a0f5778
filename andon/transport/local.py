"""A group of one worker."""

from collections.abc import Sequence
from typing import Self

import torch

from andon.engine.order import Order
from andon.transport.base import Group, Rendezvous, Settings, one_node_each, rows_of


class LocalGroup(Group):
    """World size one: nothing is exchanged, and the rows are still added in the one order."""

    rank = 0
    world_size = 1

    @classmethod
    def open(cls, rendezvous: Rendezvous, settings: Settings) -> Self:
        return cls()

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        order = order or one_node_each(1)
        order.add_up(rows_of(nodes, order, 0))

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        pass

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def close(self) -> None:
        pass
