"""The registry of transports: everything that others need to know about each one, without importing it.

Configuration, plan, runs, drills and tests read it; nobody else compares the names of transports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Final

from andon.errors import UserError
from andon.transport.base import Group, Rendezvous, Settings

SCRATCH_BYTES: Final = 8 << 20


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
