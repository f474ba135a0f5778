"""Contributions to a sum as rows of a tensor: bounds of the ranks' parts, and rounding for a bf16 wire.

A contribution has one row per node (see `andon.engine.gradients.order`); sums end in the first row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from andon.engine.gradients.order import Order, make_order

if TYPE_CHECKING:  # the configuration reads this file without torch
    import torch

Wire = Literal["f32", "bf16"]


def are_bounds(bounds: Sequence[int], total: int, parts: int) -> bool:
    """Whether bounds cut `total` elements into that number of parts."""
    whole = len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == total
    return whole and all(lo <= hi for lo, hi in pairwise(bounds))


def check_bounds(bounds: Sequence[int], total: int, parts: int) -> None:
    """Refuse bounds that do not cut `total` elements into that number of parts."""
    if not are_bounds(bounds, total, parts):
        raise ValueError(f"{list(bounds)} does not cut {total} elements into {parts} parts")


def first_row(nodes: torch.Tensor) -> torch.Tensor:
    """The row that receives the sum."""
    return nodes if nodes.dim() == 1 else nodes[0]


def rows_of(nodes: torch.Tensor, order: Order, rank: int) -> list[torch.Tensor]:
    """The rows that a rank contributes, checked against the order."""
    rows = [nodes] if nodes.dim() == 1 else list(nodes)
    if len(rows) < len(order.nodes[rank]):
        raise ValueError(f"rank {rank} contributes {len(order.nodes[rank])} nodes but has {len(rows)} rows")
    return rows[: len(order.nodes[rank])]


def round_as(wire: Wire, values: torch.Tensor) -> None:
    """Round gradients in place to the precision of the wire."""
    if wire == "bf16":
        values.copy_(values.bfloat16())


def sum_rounded(rows: Sequence[torch.Tensor], order: Order) -> torch.Tensor:
    """The sum with a bf16 wire: every term and every partial sum is rounded to bf16, so the result does not depend on
    which of them are sent. torch adds bf16 in f32 and rounds the result."""
    import torch

    leaves = [row.to(torch.bfloat16, copy=True) for row in rows]
    order.add_up(leaves)
    return leaves[0]


def one_node_each(world_size: int) -> Order:
    """The order when every rank contributes one row."""
    return make_order(world_size, world_size)
