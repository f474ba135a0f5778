"""A group of one worker. With a bf16 wire it rounds where several workers would, so that the result is the same."""

from collections.abc import Sequence
from typing import Self

import torch

from andon.engine.gradients.order import Order
from andon.transport.base import Group, Rendezvous, Settings
from andon.transport.rows import Wire, one_node_each, rows_of, sum_rounded


class LocalGroup(Group):
    """World size one: nothing is exchanged, and the rows are still added in the one order."""

    rank = 0
    world_size = 1

    def __init__(self, wire: Wire = "f32") -> None:
        self.wire = wire

    @classmethod
    def open(cls, rendezvous: Rendezvous, settings: Settings) -> Self:
        return cls(settings.wire)

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        order = order or one_node_each(1)
        rows = rows_of(nodes, order, 0)
        if self.wire == "bf16" and nodes.dtype == torch.float32:
            rows[0].copy_(sum_rounded(rows, order))
        else:
            order.add_up(rows)

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        pass

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def abort(self, rank: int, detail: str) -> None:
        """There is no other rank to wait for."""

    def leave(self) -> None:
        pass
