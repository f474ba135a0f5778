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
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

from andon.engine.gradients.order import Order, shares
from andon.errors import UserError
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
SCRATCH_BYTES: Final = 8 << 20


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


@dataclass(frozen=True)
class Traffic:
    """What the ranks of a group exchange in a step, in bytes."""

    workers: int
    rows: float
    """Rows that a rank contributes, on average."""
    gradient: int
    """Bytes of one row on the wire."""
    whole_sum: bool
    """Whether every rank needs the whole sum, and not only its part."""
    weights: int
    """Bytes of the updated weights that are gathered: all of them with ZeRO, none without."""


@dataclass(frozen=True)
class Transport:
    """What other parts of Andon need to know about a transport."""

    name: str
    group: str
    """Module, within `andon`, and class of its group; imported when a group is opened."""
    bytes_sent: Callable[[Traffic], float]
    """Bytes that a rank sends in a step, on average over the ranks."""
    buffers: Callable[[int], int] = lambda unit: SCRATCH_BYTES
    """Bytes that a rank holds besides the gradients, given the bytes of the largest unit."""
    connects: bool = True
    """Whether it connects several workers."""
    needs_server: bool = False
    """Whether the run starts a server process for its ranks."""
    joins_server: bool = False
    """Whether the ranks join a gradient server that already runs: `group.server`."""
    uses_worker_cores: bool = False
    """Whether a collective computes on the workers' cores, so that a gather in the background does not pay."""
    reduce_preserves_inputs: bool = False
    """Whether a reduce-scatter changes only a rank's part of its first row."""
    rounds_on_wire: bool = True
    """Whether a bf16 wire halves the bytes of a gradient."""
    one_order: bool = True
    """Whether sums are added in the one order for any number of ranks and rows."""
    goes_on: bool = False
    """Whether survivors can leave a collective in which a rank is lost, and open another group in the same process."""
    zero_pays: bool = True
    """Whether `zero.policy: auto` shards the optimizer state: the gather costs less than the update saves."""

    @property
    def fixed(self) -> str:
        """Why the loss of a worker ends a run; empty if it does not."""
        return "" if self.goes_on else f"The members of a group over {self.name} cannot change"

    def open(self, rendezvous: Rendezvous, settings: Settings) -> Group:
        """Open a group with all ranks at the rendezvous."""
        module, _, name = self.group.partition(":")
        group: Group = getattr(import_module(f"andon.{module}"), name).open(rendezvous, settings)
        return group


def _by_parts(traffic: Traffic) -> float:
    """Every rank sends all but one of N parts: of its rows, of the sum, of the weights."""
    total = (traffic.rows + traffic.whole_sum) * traffic.gradient + traffic.weights
    return total * (traffic.workers - 1) / traffic.workers


def _to_server(traffic: Traffic) -> float:
    """Every rank sends all its rows, and the weights that it has updated."""
    return traffic.rows * traffic.gradient + traffic.weights / traffic.workers


def _round_a_ring(traffic: Traffic) -> float:
    """Every rank adds up its rows and sends their sum."""
    return _by_parts(replace(traffic, rows=1))


def _to_protocol2_server(traffic: Traffic) -> float:
    """Every rank sends one row to the server, and the weights that it has updated round a ring."""
    return traffic.gradient + traffic.weights * (traffic.workers - 1) / traffic.workers


TRANSPORTS: Final[dict[str, Transport]] = {
    each.name: each
    for each in (
        Transport(
            "local",
            "transport.local:LocalGroup",
            lambda traffic: 0,
            buffers=lambda unit: 0,
            connects=False,
            goes_on=True,
            zero_pays=False,
        ),
        Transport(
            "shm",
            "transport.shm.group:ShmGroup",
            _by_parts,
            uses_worker_cores=True,
            reduce_preserves_inputs=True,
            rounds_on_wire=False,
            goes_on=True,
        ),
        Transport("star", "transport.tcp.star:StarGroup", _to_server, needs_server=True, goes_on=True, zero_pays=False),
        Transport("ring", "transport.tcp.ring:RingGroup", _round_a_ring, one_order=False, goes_on=True),
        Transport("torch", "transport.torch_dist:TorchGroup", _by_parts, buffers=lambda unit: unit),
        Transport(
            "protocol2",
            "protocol2.group:Protocol2Group",
            _to_protocol2_server,
            buffers=lambda unit: unit,
            joins_server=True,
            rounds_on_wire=False,
            one_order=False,
            zero_pays=False,
        ),
    )
}


def open_group(transport: str, rendezvous: Rendezvous, settings: Settings | None = None) -> Group:
    """Open a group over a transport with all ranks at the rendezvous."""
    found = TRANSPORTS.get(transport)
    if found is None:
        cause = "group.transport names how workers exchange"
        raise UserError(f"there is no transport {transport!r}", cause, f"choose one of {', '.join(TRANSPORTS)}")
    if not found.connects and rendezvous.world_size > 1:
        raise UserError(
            f"transport {transport!r} cannot connect {rendezvous.world_size} workers",
            "it is the transport for one worker",
            f"choose group.transport {', '.join(each.name for each in TRANSPORTS.values() if each.connects)}",
        )
    return found.open(rendezvous, settings or Settings())


def fastest_here(workers: int) -> str:
    """The transport that `auto` chooses when all workers run on this machine."""
    if workers == 1:
        return "local"
    return "shm" if sys.platform == "linux" else "torch"


def _bytes_tensor(data: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]


def _tail(detail: str) -> str:
    return f": {detail}" if detail else ""
