"""A group: the ranks that exchange, and what they can do together.

Two collectives carry everything. `reduce_scatter` sums the ranks' contributions in the order of
`andon.engine.order`; afterwards rank r holds the sum of elements [bounds[r], bounds[r + 1]). `all_gather`
gives every rank each rank's part. An all-reduce is one after the other; a broadcast is a gather in which one
rank owns everything. Both work in place on flat tensors, so that an arena is exchanged without a copy.

A contribution has one *row* per node (see `andon.engine.order`): a tensor of shape (rows, n), or (n,) for one
row. Sums end in the first row. Everything blocks, has a deadline, and fails with an exception that names the
peer, the operation and the seconds it took.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from andon.engine.order import Order, make_order, shares

if TYPE_CHECKING:  # the coordinator shares this file's errors and needs no torch
    import torch

Wire = Literal["f32", "bf16"]


class GroupError(Exception):
    """A peer or a link failed; the group can no longer be used."""


class PeerLost(GroupError):
    """A peer is gone."""

    def __init__(self, rank: int, operation: str, seconds: float, detail: str = "") -> None:
        super().__init__(f"rank {rank} was lost during {operation} after {seconds:.1f} s" + _tail(detail))
        self.rank, self.operation, self.seconds = rank, operation, seconds


class GroupTimeout(GroupError):
    """A peer is there but has made no progress for the configured time."""

    def __init__(self, rank: int, operation: str, seconds: float, detail: str = "") -> None:
        super().__init__(f"rank {rank} made no progress in {operation} for {seconds:.1f} s" + _tail(detail))
        self.rank, self.operation, self.seconds = rank, operation, seconds


class ProtocolError(GroupError):
    """A peer said something that the protocol does not allow."""


class Rendezvous(Protocol):
    """How the ranks of a group find each other before they are connected."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Give my word on a topic and get everybody's, by rank; waits for all, with a deadline."""
        ...


class Group(ABC):
    """One membership of ranks that exchange over one transport."""

    rank: int
    world_size: int
    bytes_sent: int = 0
    """Payload that this rank has sent; in shared memory, what it moved between its own and others'."""
    reduce_preserves_inputs: bool = False
    """Whether a reduce-scatter leaves everyone's rows as they were, but for their own part of the first."""

    @abstractmethod
    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        """Sum everyone's rows in the one order; my part of the sum ends in my part of the first row."""

    @abstractmethod
    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        """Fill in everyone's part of `flat` from the rank that owns it."""

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Everybody's small message, by rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and free what it holds; safe to call twice."""

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        """Sum everyone's rows in the one order, in place, on every rank (in the first row)."""
        bounds = shares(nodes.shape[-1], self.world_size)
        self.reduce_scatter(nodes, bounds, order)
        self.all_gather(first_row(nodes), bounds)

    def broadcast(self, flat: torch.Tensor, src: int) -> None:
        """Copy `flat` from one rank to all."""
        self.all_gather(flat, [0] * (src + 1) + [flat.numel()] * (self.world_size - src))

    def allocate(self, rows: int, size: int) -> torch.Tensor:
        """A zeroed buffer of (rows, size) floats where this transport exchanges best; every rank calls it."""
        import torch

        return torch.zeros(rows, size)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather_bytes(b"")

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def first_row(nodes: torch.Tensor) -> torch.Tensor:
    """Where the sum of a contribution ends."""
    return nodes if nodes.dim() == 1 else nodes[0]


def rows_of(nodes: torch.Tensor, order: Order, rank: int) -> list[torch.Tensor]:
    """The rows that a rank contributes, checked against the order."""
    rows = [nodes] if nodes.dim() == 1 else list(nodes)
    if len(rows) < len(order.nodes[rank]):
        raise ValueError(f"rank {rank} contributes {len(order.nodes[rank])} nodes but has {len(rows)} rows")
    return rows[: len(order.nodes[rank])]


def one_node_each(world_size: int) -> Order:
    """The order when every rank contributes one row."""
    return make_order(world_size, world_size)


def _tail(detail: str) -> str:
    return f": {detail}" if detail else ""
