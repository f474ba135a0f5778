"""A group whose gradients are averaged by a gradient server of protocol 2, Andon's or another's.

Every rank is a worker of the server, and joins in the order of ranks, so that its worker id is its rank. The server
sees the dialogue of pretraining: each step the blocks from the last to the first, then LM head, final norm and
embedding; a unit that is none of these three is a block, and a component that a model lacks is empty. What comes back
is the mean, times the number of workers the sum. The bits are those of every other transport with one worker, and with
two if the number of slots is a power of two, so that each has one half of their tree. Before a model has said what its
units are, a sum is a whole vector.

Protocol 2 has no message for anything else. Losses, norms, fingerprints, weights and heartbeats travel between the
ranks themselves, as in a ring (`andon.transport.tcp.ring`), whose failure detector also tells who is lost.
"""

import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Self

import numpy as np
import torch

from andon.engine.gradients.order import Order
from andon.errors import UserError
from andon.protocol2.client import ServerHalted, ServerShutdown, WorkerClient, too_long
from andon.protocol2.link import Move
from andon.protocol2.wire.dialogue import BLOCK, COMPONENT, Part
from andon.protocol2.wire.messages import JoinRequest, ShardAssignment
from andon.transport.address import address_text
from andon.transport.base import GroupError, ProtocolError, Rendezvous, Settings, Units, peer_name
from andon.transport.keys import SERVER
from andon.transport.rows import check_bounds, first_row, one_node_each, round_as, rows_of
from andon.transport.tcp.encoding import add, on_host
from andon.transport.tcp.frames import MAX_FRAME, Broken, Floats
from andon.transport.tcp.ring import RingGroup

COMPONENT_UNITS: Final = ("lm_head", "model.norm", "model.embed_tokens")
"""The units that are components 0, 1 and 2."""
LONGEST_HEAD: Final = 100
"""Bytes of a message besides its floats and sizes."""


class Protocol2Group(RingGroup):
    """A rank that is a worker of a gradient server."""

    transport = "protocol2"

    def __init__(self, *ring: Any) -> None:
        super().__init__(*ring)
        self._client: WorkerClient | None = None
        self._place = ""
        self._step = 0
        self._parts: list[tuple[Part, bool]] = []
        """The parts of a step, if a model has said what it exchanges, and whether a unit belongs to each."""
        self._next = 0
        self._units, self._reduced = 1, 0
        """How many units a step has, and how many of them are reduced."""
        self._halted: ServerHalted | None = None
        self._done = False
        """Whether this rank leaves because its work is done."""

    @property
    def client(self) -> WorkerClient:
        """This rank as a worker of the server."""
        assert self._client is not None, "the group is not open"
        return self._client

    @classmethod
    def open(cls, rendezvous: Rendezvous, settings: Settings) -> Self:
        """Connect to the other ranks, and join the server in turn."""
        if settings.server is None:
            cause = "Its workers join a gradient server that is there already"
            raise UserError("Transport 'protocol2' needs the address of its server", cause, "Give --group.server")
        group = super().open(rendezvous, settings)
        try:
            for turn in range(group.world_size):
                error = group._join(settings.server) if turn == group.rank else []
                if said := rendezvous.exchange(f"protocol2 {turn}", "\n".join(error))[turn]:
                    raise UserError(*said.split("\n", 2))
        except BaseException:
            group.leave()
            raise
        return group

    def exchange_order(self, units: Units) -> Sequence[int]:
        """The blocks, then LM head, final norm and embedding."""
        blocks = [index for index, (name, _) in enumerate(units) if name not in COMPONENT_UNITS]
        parts = [
            (Part(BLOCK, 0, len(blocks) - 1 - place, len(blocks), units[index][1], length=sum(units[index][1])), True)
            for place, index in enumerate(blocks)
        ]
        found = {name: index for index, (name, _) in enumerate(units)}
        for component, name in enumerate(COMPONENT_UNITS):
            length = sum(units[found[name]][1]) if name in found else 0
            parts.append((Part(COMPONENT, 0, component, length=length), name in found))
        for part, _ in parts:
            if 4 * (part.length + len(part.sizes)) + LONGEST_HEAD > MAX_FRAME and not self.client.piece_floats:
                raise too_long(part.length)
        self._parts, self._next = parts, 0
        self._units, self._reduced = len(units), 0
        return blocks + [found[name] for name in COMPONENT_UNITS if name in found]

    def all_reduce(self, nodes: torch.Tensor, order: Order | None = None) -> None:
        self._sum("all-reduce", nodes, order)

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        with self._explaining():
            super().all_gather(flat, bounds)

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        check_bounds(bounds, nodes.shape[-1], self.world_size)
        self._sum("reduce-scatter", nodes, order)

    def close(self) -> None:
        self._done = True
        super().close()

    def leave(self) -> None:
        if self._client and self._done:
            self._client.close()
        elif self._client:
            self._client.abort()
        super().leave()

    def _join(self, server: tuple[str, int]) -> list[str]:
        """Join the server; the lines of an error that all ranks are told."""
        place = self._place = address_text(*server)
        request = JoinRequest(f"{socket.gethostname()} rank {self.rank}", 0, "cpu")
        try:
            client = self._client = WorkerClient(server, request, mover=self._mover)
        except GroupError as error:
            remedy = f"Start one there with `andon gradient-server --workers {self.world_size}`, and then this run"
            return [f"The gradient server at {place} cannot be joined", str(error), remedy]
        if client.total_workers != self.world_size:
            cause = "The mean would be taken over workers that are not of this run"
            what = f"The gradient server at {place} serves {client.total_workers} workers, not {self.world_size}"
            return [what, cause, f"Start it with --workers {self.world_size}, or give the run as many --workers"]
        if client.worker_id != self.rank:
            what = f"Rank {self.rank} is worker {client.worker_id} of the gradient server at {place}"
            return [what, "A worker that is not of this run has joined it, too", "Start the server again"]
        return []

    def _mover(self, sock: socket.socket) -> Move:
        """What moves the client's streams: the failure detector, which knows for whom the others wait."""
        self._detector.watch(sock)
        patience = self._detector.timeout / 2
        return lambda streams, operation: self._detector.run(streams, operation, patience)

    def _sum(self, operation: str, nodes: torch.Tensor, order: Order | None) -> None:
        if nodes.dtype != torch.float32:
            raise ValueError(f"only float32 can be summed, not {nodes.dtype}")
        order = order or one_node_each(self.world_size)
        with on_host(nodes) as host:
            total, rows = first_row(host), rows_of(host, order, self.rank)
            if not rows:
                total.zero_()
            for row in rows:
                round_as(self.wire, row)
            for row in rows[1:]:
                add(total.numpy(), row.numpy())
                round_as(self.wire, total)
            with self._explaining():
                self._detector.begin(operation)
                mean = self._average(total.numpy(), operation)
            np.multiply(mean, np.float32(self.world_size), out=total.numpy())
            round_as(self.wire, total)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """A context in which an error of the server says what to do about it."""
        try:
            yield
        except GroupError as error:
            if isinstance(error, ServerHalted) or str(error).startswith(peer_name(SERVER)):
                cause, error.remedy = _explanation(error)
                error.cause = f"The gradient server at {self._place} {cause}"
            raise

    def _average(self, mine: Floats, operation: str) -> Floats:
        """The mean of the next part. A server that halts has found what this run finds, too: until the end of the step
        the mean is NaN, so that the run halts with the findings of all ranks."""
        if self._halted and self._reduced == 0:
            raise self._halted
        mean = np.full_like(mine, math.nan)
        try:
            if not self._halted:
                mean = self._average_next(mine)
        except ServerHalted as halted:
            self._halted = halted
        except ProtocolError as error:
            raise self._detector.refuse(SERVER, str(error), operation) from error
        except ServerShutdown as error:
            raise self._detector.lost(SERVER, operation, 0.0, str(error)) from error
        for rank, reason in self.client.lost.items():
            raise self._detector.publish_verdict(Broken("lost", rank, reason), operation, 0.0)
        self._reduced = (self._reduced + 1) % self._units
        self.bytes_sent += mine.nbytes
        return mean

    def _average_next(self, mine: Floats) -> Floats:
        if not self._parts:
            self._step += 1
            return self.client.average(self._step - 1, mine)[0]
        self._skip_empty()
        mean = self._exchange(mine)
        self._skip_empty()
        return mean

    def _skip_empty(self) -> None:
        """Exchange components that the model does not have."""
        while self._next < len(self._parts) and not self._parts[self._next][1]:
            self._exchange(np.empty(0, np.float32))
        if self._next == len(self._parts):
            self._next = 0
            self._step += 1

    def _exchange(self, mine: Floats) -> Floats:
        part, _ = self._parts[self._next]
        assert part.length == len(mine), (part, len(mine))
        part = replace(part, step=self._step)
        self._next += 1
        if part.tag == BLOCK:
            return self.client.average_block(part, mine)
        return self.client.average_component(part, mine)


def _explanation(error: GroupError) -> tuple[str, str]:
    """What the server has done, and what to do about it."""
    if isinstance(error, ServerHalted):
        return "found a gradient that is not finite", "Look at halt.json in the server's folder"
    if ShardAssignment.__name__ in str(error):
        return "shares out samples, as for fine-tuning", "Start it without --samples, then this command: it resumes"
    if isinstance(error, ProtocolError):
        return "does not answer as protocol 2 has it", "Use `andon gradient-server`, or mend the other implementation"
    return "has ended or cannot be reached", "Start `andon gradient-server` again, then this command: it resumes"
