"""A group: the ranks that exchange, and what they can do together.

Two collectives carry everything. `reduce_scatter` sums the ranks' contributions in the order of
`andon.engine.gradients.order`; afterwards rank r holds the sum of elements [bounds[r], bounds[r + 1]). `all_gather`
gives every rank each rank's part. An all-reduce is one after the other; a broadcast is a gather in which one rank owns
everything. Both work in place on flat tensors, so that an arena is exchanged without a copy.

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
"""The name of each unit, and the elements of its parameters, padding included."""
INLINE_BYTES: Final = 252
SMALL_MESSAGE: Final = struct.Struct(f"<I{INLINE_BYTES}s")
"""A small message: its length and its first bytes."""
LONGEST_MESSAGE: Final = 1 << 26
SCRATCH_BYTES: Final = 8 << 20


class GroupError(Exception):
    """A peer or a link failed; the group can no longer be used."""

    cause: str = "A worker died or cannot be reached"
    remedy: str = ""
    """What to try, if it is not to start again."""


COORDINATOR: Final = -2
SOMEONE: Final = -3
NAMES: Final = {SERVER: "the gradient server", COORDINATOR: "the coordinator", SOMEONE: "another rank"}
"""Peers that have no rank, as errors name them."""


class PeerLost(GroupError):
    """A peer is gone."""

    def __init__(self, rank: int, operation: str, seconds: float, detail: str = "") -> None:
        super().__init__(f"{peer_name(rank)} was lost during {operation} after {seconds:.1f} s" + _tail(detail))
        self.rank, self.operation, self.seconds = rank, operation, seconds


class GroupTimeout(GroupError):
    """A peer is there but has made no progress for the configured time."""

    def __init__(self, rank: int, operation: str, seconds: float, detail: str = "") -> None:
        super().__init__(f"{peer_name(rank)} made no progress in {operation} for {seconds:.1f} s" + _tail(detail))
        self.rank, self.operation, self.seconds = rank, operation, seconds


class ProtocolError(GroupError):
    """A peer sent something that the protocol does not allow."""


def peer_name(rank: int) -> str:
    """A peer, as errors name it."""
    return NAMES.get(rank, f"rank {rank}")


class Rendezvous(Protocol):
    """How the ranks of a group find each other before they are connected."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    def exchange(self, topic: str, mine: str) -> list[str]:
        """Publish my value for a topic and get everybody's, by rank; waits for all, with a deadline."""
        ...


class Abortable(Protocol):
    """A group, or what opens one."""

    def abort(self, rank: int, detail: str) -> None:
        """A rank is known to be lost: whoever waits for it stops waiting."""
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
    """With which this rank and its peers prove to each other who they are; ranks that have none agree on some."""
    tls: Tls | None = None
    """Certificates, if connections are to be encrypted."""
    store: Store | None = None
    """Where ranks of torch.distributed find each other; without one rank 0 opens its own."""
    watch: Callable[[Abortable], None] = lambda group: None
    """Told of the group before its first collective, and of what opens it, so that these can be aborted."""


class Group(ABC):
    """One membership of ranks that exchange over one transport."""

    rank: int
    world_size: int
    generation: int = 0
    """Which membership of the run this is."""
    transport: str = "local"
    wire: Wire = "f32"
    """How gradients are rounded: with bf16 every node of the order of addition is (`engine.gradients.order`)."""
    mixed: bool = False
    """Whether its machines compute other bits: then each weight is updated by one rank and sent to the others."""
    stop_wanted: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank was asked to stop; all ranks learn it with the next step."""
    change_wanted: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank knows that somebody waits to join, or is to leave; all ranks learn it with the next step."""
    shrink_wanted: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank knows that somebody is to leave."""
    exchanging: bool = False
    """Whether a model exchanges over it: its collectives come from one thread, so there can be only one."""
    bytes_sent: int = 0
    """Payload that this rank has sent; in shared memory, what it moved between its own and others'."""

    @abstractmethod
    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        """Sum everyone's rows in the one order; my part of the sum ends in my part of the first row."""

    @abstractmethod
    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        """Fill in everyone's part of `flat` from the rank that owns it."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Everybody's small message, by rank. A short one takes one all-gather, a longer one two."""
        import torch

        size = SMALL_MESSAGE.size
        cells = torch.zeros(self.world_size, size, dtype=torch.uint8)
        cells[self.rank] = _bytes_tensor(SMALL_MESSAGE.pack(len(data), data[:INLINE_BYTES]))
        self.all_gather(cells.view(-1), range(0, size * (self.world_size + 1), size))
        starts = [SMALL_MESSAGE.unpack(cell.numpy()) for cell in cells]
        rests = [max(0, length - INLINE_BYTES) for length, _ in starts]
        if max(rests) > LONGEST_MESSAGE:
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
        """A rank is known to be lost: every collective that runs or begins raises `PeerLost`. Any thread may call it,
        more than once."""

    @cached_property
    def before_close(self) -> list[Callable[[], None]]:
        """What has to be done with the group before it is left, such as the end of a save; the last one first."""
        return []

    def close(self) -> None:
        """Finish what was begun, together with all ranks, and leave the group; safe to call twice."""
        try:
            while self.before_close:
                self.before_close.pop()()
        finally:
            self.leave()

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        """Sum everyone's rows in the one order, in place, on every rank (in the first row)."""
        bounds = shares(nodes.shape[-1], self.world_size)
        self.reduce_scatter(nodes, bounds, order)
        self.all_gather(first_row(nodes), bounds)

    def broadcast(self, flat: torch.Tensor, src: int) -> None:
        """Copy `flat` from one rank to all."""
        self.all_gather(flat, [0] * (src + 1) + [flat.numel()] * (self.world_size - src))

    def exchange_order(self, units: Units) -> Sequence[int]:
        """A model will reduce these units in every step: in which order. Every rank calls it."""
        return range(len(units))

    def allocate(self, rows: int, size: int) -> torch.Tensor:
        """A zeroed buffer of (rows, size) floats where this transport exchanges best; every rank calls it."""
        import torch

        return torch.zeros(rows, size)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Everybody's small value, by rank, sent as JSON."""
        return [json.loads(each) for each in self.all_gather_bytes(json.dumps(value).encode())]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather_bytes(b"")

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the others may be gone, or somewhere else: there is nothing to finish.
        if kind is None:
            self.close()
        else:
            self.leave()


class Opens(Protocol):
    """The class of a transport's group."""

    def open(self, rendezvous: Rendezvous, settings: Settings) -> Group:
        """Open the group together with everyone at the rendezvous."""
        ...


@dataclass(frozen=True)
class Traffic:
    """What the ranks of a group exchange in a step, in bytes."""

    workers: int
    rows: float
    """Rows that a rank contributes, on average."""
    gradient: int
    """Bytes of one row, as it travels."""
    whole_sum: bool
    """Whether every rank needs the whole sum, and not only its own part."""
    weights: int
    """Bytes of the updated weights that are gathered: all of them with ZeRO, none without."""


@dataclass(frozen=True)
class Transport:
    """What everyone else needs to know about a transport."""

    name: str
    group: str
    """Module, within `andon`, and class of its group; imported when a group is opened."""
    bytes_sent: Callable[[Traffic], float]
    """Bytes that a rank sends in a step, on average over the ranks."""
    buffers: Callable[[int], int] = lambda unit: SCRATCH_BYTES
    """Bytes that a rank holds besides the gradients, if the largest unit has so many."""
    connects: bool = True
    """Whether it connects several workers."""
    needs_server: bool = False
    """Whether the run starts a server process for its ranks."""
    joins_server: bool = False
    """Whether the ranks join a gradient server that is there already: `group.server`."""
    uses_worker_cores: bool = False
    """Whether a collective computes on the workers' own cores, so that a gather in the background does not pay."""
    reduce_preserves_inputs: bool = False
    """Whether a reduce-scatter changes nothing but a rank's own part of its first row."""
    rounds_on_wire: bool = True
    """Whether a bf16 wire halves the bytes of a gradient."""
    one_order: bool = True
    """Whether sums are added in the one order for any number of ranks and rows."""
    goes_on: bool = False
    """Whether survivors can leave a collective in which a rank is lost, and open another group in the same process."""
    zero_pays: bool = True
    """Whether `zero.policy: auto` shares out the optimizer state: does the gather cost less than the update saves?"""

    @property
    def fixed(self) -> str:
        """Why the loss of a worker ends a run, if it does."""
        return "" if self.goes_on else f"The members of a group over {self.name} cannot change"

    def open(self, rendezvous: Rendezvous, settings: Settings) -> Group:
        """Open a group with everyone at the rendezvous."""
        module, _, name = self.group.partition(":")
        group: Opens = getattr(import_module(f"andon.{module}"), name)
        return group.open(rendezvous, settings)


def _by_parts(traffic: Traffic) -> float:
    """Every rank keeps its own of N parts and sends the others: of its rows, of the sum, of the weights."""
    total = (traffic.rows + traffic.whole_sum) * traffic.gradient + traffic.weights
    return total * (traffic.workers - 1) / traffic.workers


def _to_server(traffic: Traffic) -> float:
    """Every rank sends all its rows, and the weights that it has updated."""
    return traffic.rows * traffic.gradient + traffic.weights / traffic.workers


def _round_a_ring(traffic: Traffic) -> float:
    """Every rank adds up its rows and sends one of them."""
    return _by_parts(replace(traffic, rows=1))


def _to_protocol2_server(traffic: Traffic) -> float:
    """Every rank sends one row, and the weights that it has updated round a ring."""
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
    """Open a group over a transport with everyone at the rendezvous."""
    found = TRANSPORTS.get(transport)
    if found is None:
        cause = "group.transport names how workers exchange"
        raise UserError(f"there is no transport {transport!r}", cause, f"choose one of {', '.join(TRANSPORTS)}")
    if not found.connects and rendezvous.world_size > 1:
        raise UserError(
            f"transport {transport!r} cannot connect {rendezvous.world_size} workers",
            "it is the group of one worker",
            f"choose group.transport {', '.join(each.name for each in TRANSPORTS.values() if each.connects)}",
        )
    return found.open(rendezvous, settings or Settings())


def fastest_here(workers: int) -> str:
    """The transport that `auto` takes for workers that all run on this machine."""
    if workers == 1:
        return "local"
    return "shm" if sys.platform == "linux" else "torch"


def _bytes_tensor(data: bytes) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]


def _tail(detail: str) -> str:
    return f": {detail}" if detail else ""
