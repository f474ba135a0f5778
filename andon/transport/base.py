"""A group: the ranks that exchange, and their collectives.

Two collectives carry everything. `reduce_scatter` sums the ranks' contributions in the order of
`andon.engine.gradients.order`; afterwards rank r holds the sum of elements [bounds[r], bounds[r + 1]). `all_gather`
gives every rank each rank's part. An all-reduce is a reduce-scatter and then an all-gather; a broadcast is an
all-gather in which one rank owns everything. Both work in place on flat tensors, so that an arena is exchanged without
a copy.

A contribution has one *row* per node (see `andon.engine.gradients.order`): a tensor of shape (rows, n), or (n,) for one
row. Sums end in the first row. Everything blocks, has a deadline, and fails with an exception that names the peer, the
operation and the seconds it took.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

from andon.engine.gradients.order import Order, shares
from andon.transport.keys import SERVER
from andon.transport.rows import Wire, first_row

if TYPE_CHECKING:  # the launcher, the coordinator and the configuration read this file without torch
    import torch
    from torch._C._distributed_c10d import Store

    from andon.transport.keys import LinkKeys
    from andon.transport.tcp.entrance.tls import Tls

Units = Sequence[tuple[str, tuple[int, ...]]]
"""The name of each unit, and the number of elements of each of its parameters, padding included."""
INLINE_BYTES: Final = 252
SMALL_MESSAGE: Final = struct.Struct(f"<I{INLINE_BYTES}s")
"""A small message: its length and its first bytes."""
MAX_MESSAGE_BYTES: Final = 1 << 26


class GroupError(Exception):
    """A peer or a link failed; the group can no longer be used."""

    cause: str = "A worker died or cannot be reached"
    remedy: str = ""
    """What to try; empty if the remedy is to start again."""


COORDINATOR: Final = -2
SOMEONE: Final = -3
PEER_NAMES: Final = {SERVER: "the gradient server", COORDINATOR: "the coordinator", SOMEONE: "another rank"}
"""How errors name peers that have no rank."""


class PeerLost(GroupError):
    """A peer is gone."""

    def __init__(self, rank: int, operation: str, seconds: float, detail: str = "") -> None:
        super().__init__(f"{peer_name(rank)} was lost during {operation} after {seconds:.1f} s" + _tail(detail))
        self.rank, self.operation, self.seconds = rank, operation, seconds


class GroupTimeout(GroupError):
    """A peer has made no progress for the configured time."""

    def __init__(self, rank: int, operation: str, seconds: float, detail: str = "") -> None:
        super().__init__(f"{peer_name(rank)} made no progress in {operation} for {seconds:.1f} s" + _tail(detail))
        self.rank, self.operation, self.seconds = rank, operation, seconds


class ProtocolError(GroupError):
    """A peer sent something that the protocol does not allow."""

    cause = "The ranks call different operations, or the peer is another program or another version of Andon"


def peer_name(rank: int) -> str:
    """How errors name a peer."""
    return PEER_NAMES.get(rank, f"rank {rank}")


class Rendezvous(Protocol):
    """How the ranks of a group find each other before they are connected."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Publish this rank's value for a topic, wait for all ranks, with a deadline, and return the values by rank."""
        ...


class Abortable(Protocol):
    """A group, or one that is being opened."""

    def abort(self, rank: int, detail: str) -> None:
        """Stop waiting, because a rank is known to be lost."""
        ...


@dataclass(frozen=True)
class Settings:
    """What a transport needs to open a group."""

    timeout: float = 60.0
    """Seconds without progress after which a peer counts as stalled."""
    wire: Wire = "f32"
    """How gradients are rounded on the way."""
    host: str = "127.0.0.1"
    """Where the other ranks can reach this one."""
    server: tuple[str, int] | None = None
    """Address of the server, for a transport that needs one."""
    keys: LinkKeys | None = None
    """Keys that authenticate the links to peers; ranks without keys agree on some at the rendezvous."""
    tls: Tls | None = None
    """Certificates, if connections are to be encrypted."""
    store: Store | None = None
    """A store for torch.distributed; without one, rank 0 opens it."""
    watch: Callable[[Abortable], None] = lambda group: None
    """Called with the group before its first collective, and before that with the object that opens it, so that either
    can be aborted."""


class Group(ABC):
    """One membership of ranks that exchange over one transport."""

    rank: int
    world_size: int
    generation: int = 0
    """Which membership of the run this is."""
    transport: str = "local"
    wire: Wire = "f32"
    """How gradients are rounded: bf16 rounds every node of the order of addition. A plain all-gather is exact."""
    mixed: bool = False
    """Whether its machines compute different bits; then one rank updates each weight and sends it to the others."""
    stop_wanted: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank was asked to stop; the next step reports it to all ranks."""
    change_wanted: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank knows that a worker waits to join or is to leave; the next step reports it to all ranks."""
    shrink_wanted: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank knows that a worker is to leave."""
    exchanging: bool = False
    """Whether a model exchanges over this group; only one can, because all collectives come from one thread."""
    bytes_sent: int = 0
    """Payload bytes that this rank has sent; in shared memory, those moved between its memory and other ranks'."""

    @abstractmethod
    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        """Sum all ranks' rows in the one order; this rank's part of the sum ends in that part of its first row."""

    @abstractmethod
    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        """Fill in each part of `flat` from the rank that owns it."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather a small message from every rank. Up to `INLINE_BYTES` take one all-gather, more take two."""
        import torch

        size = SMALL_MESSAGE.size
        cells = torch.zeros(self.world_size, size, dtype=torch.uint8)
        cells[self.rank] = _bytes_tensor(SMALL_MESSAGE.pack(len(data), data[:INLINE_BYTES]))
        self.all_gather(cells.view(-1), range(0, size * (self.world_size + 1), size))
        starts = [SMALL_MESSAGE.unpack(cell.numpy()) for cell in cells]
        rests = [max(0, length - INLINE_BYTES) for length, _ in starts]
        if max(rests) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"rank {rests.index(max(rests))} sends a message of {max(rests):,} bytes")
        bounds = [0, *accumulate(rests)]
        rest = torch.empty(bounds[-1], dtype=torch.uint8)
        if bounds[-1]:
            rest[bounds[self.rank] : bounds[self.rank + 1]] = _bytes_tensor(data[INLINE_BYTES:])
            self.all_gather(rest, bounds)
        tails = [rest[lo:hi].numpy().tobytes() for lo, hi in pairwise(bounds)]
        return [start[:length] + tail for (length, start), tail in zip(starts, tails, strict=True)]

    @abstractmethod
    def leave(self) -> None:
        """Leave the group at once and free what it holds; safe to call twice."""

    @abstractmethod
    def abort(self, rank: int, detail: str) -> None:
        """Make every collective that runs or begins raise `PeerLost`, because a rank is known to be lost. Any thread
        may call it, more than once."""

    @cached_property
    def before_close(self) -> list[Callable[[], None]]:
        """Callbacks that `close` runs before it leaves, such as the end of a save; the last one first."""
        return []

    def close(self) -> None:
        """Run `before_close` together with all ranks and leave the group; safe to call twice."""
        try:
            while self.before_close:
                self.before_close.pop()()
        finally:
            self.leave()

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        """Sum all ranks' rows in the one order, into the first row of every rank."""
        bounds = shares(nodes.shape[-1], self.world_size)
        self.reduce_scatter(nodes, bounds, order)
        self.all_gather(first_row(nodes), bounds)

    def broadcast(self, flat: torch.Tensor, src: int) -> None:
        """Copy `flat` from one rank to all."""
        self.all_gather(flat, [0] * (src + 1) + [flat.numel()] * (self.world_size - src))

    def exchange_order(self, units: Units) -> Sequence[int]:
        """The order in which a model must reduce these units in every step. Every rank calls it."""
        return range(len(units))

    def allocate(self, rows: int, size: int) -> torch.Tensor:
        """Allocate a zeroed buffer of (rows, size) floats in memory that suits this transport; every rank calls it."""
        import torch

        return torch.zeros(rows, size)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Everybody's small value, by rank, sent as JSON."""
        return [json.loads(each) for each in self.all_gather_bytes(json.dumps(value).encode())]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather_bytes(b"")

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may be gone or in another operation, so nothing can be finished together.
        if kind is None:
            self.close()
        else:
            self.leave()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]


def _tail(detail: str) -> str:
    return f": {detail}" if detail else ""
