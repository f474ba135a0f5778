"""A group whose gradients are averaged by a gradient server of protocol 2, Andon's or another implementation.

Every rank is a worker of the server. Ranks join in order, so that the worker id is the rank. The server sees the
dialogue of pretraining: in each step the blocks from the last to the first, then LM head, final norm and embedding. A
unit that is none of these three is a block, and a component that the model lacks is empty. The server returns the mean;
multiplied by the number of workers it is the sum. The bits are those of every other transport with one worker, and with
two if the number of slots is a power of two, so that each has one half of their tree. Until a model has declared its
units with `exchange_order`, a sum is a whole vector.

Protocol 2 has no message for anything else. Losses, norms, fingerprints, weights and heartbeats are exchanged between
the ranks themselves, as in a ring (`andon.transport.tcp.ring`), whose failure detector also finds a lost rank.
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
from andon.transport.rows import check_bounds, one_node_each, round_as
from andon.transport.tcp.encoding import add, contribution
from andon.transport.tcp.frames import MAX_FRAME_BYTES, Broken, Floats
from andon.transport.tcp.ring import RingGroup

COMPONENT_UNITS: Final = ("lm_head", "model.norm", "model.embed_tokens")
"""The units that are components 0, 1 and 2."""
MAX_OTHER_BYTES: Final = 100
"""Bytes of a message besides its floats and sizes."""


class Protocol2Group(RingGroup):
    """A rank that is a worker of a gradient server."""

    transport = "protocol2"

    def __init__(self, *ring: Any) -> None:
        super().__init__(*ring)
        self._client: WorkerClient | None = None
        self._server = ""
        """The address of the server, as errors name it."""
        self._step = 0
        self._parts: list[tuple[Part, bool]] = []
        """The parts of a step, once a model has declared its units, and whether each part is a unit."""
        self._next = 0
        self._units, self._reduced = 1, 0
        """The number of units in a step, and how many of them have been reduced."""
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
        """Connect to the other ranks, and join the server, one rank after the other."""
        if settings.server is None:
            cause = "Its workers join a gradient server that already runs"
            raise UserError("Transport 'protocol2' needs the address of its server", cause, "Give --group.server")
        group = super().open(rendezvous, settings)
        try:
            for turn in range(group.world_size):
                error = group._join(settings.server) if turn == group.rank else []
                if lines := rendezvous.exchange(f"protocol2 {turn}", "\n".join(error))[turn]:
                    raise UserError(*lines.split("\n", 2))
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
            size = 4 * (part.length + len(part.sizes)) + MAX_OTHER_BYTES
            if size > MAX_FRAME_BYTES and not self.client.piece_floats:
                raise too_long(part.length)
        self._parts, self._next = parts, 0
        self._units, self._reduced = len(units), 0
        return blocks + [found[name] for name in COMPONENT_UNITS if name in found]

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        with self._explaining():
            super().all_gather(flat, bounds)

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
        """Join the server; returns the lines of an error that all ranks raise, if there is one."""
        address = self._server = address_text(*server)
        request = JoinRequest(f"{socket.gethostname()} rank {self.rank}", 0, "cpu")
        try:
            client = self._client = WorkerClient(server, request, mover=self._mover)
        except GroupError as error:
            remedy = f"Start one there with `andon gradient-server --workers {self.world_size}`, and then this run"
            return [f"The gradient server at {address} cannot be joined", str(error), remedy]
        if client.total_workers != self.world_size:
            cause = "The mean would include workers that do not belong to this run"
            what = f"The gradient server at {address} serves {client.total_workers} workers, not {self.world_size}"
            return [what, cause, f"Start it with --workers {self.world_size}, or give the run as many --workers"]
        if client.worker_id != self.rank:
            what = f"Rank {self.rank} is worker {client.worker_id} of the gradient server at {address}"
            return [what, "A worker that does not belong to this run has also joined it", "Start the server again"]
        return []

    def _mover(self, sock: socket.socket) -> Move:
        """Let the failure detector move the client's streams: it knows which rank the others wait for."""
        self._detector.watch(sock)
        patience = self._detector.timeout / 2
        return lambda streams, operation: self._detector.run(streams, operation, patience)

    def _reduce(self, operation: str, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None) -> None:
        check_bounds(bounds, nodes.shape[-1], self.world_size)
        with contribution(nodes, order or one_node_each(self.world_size), self.rank) as (total, rows):
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
        """Add cause and remedy to an error of the server."""
        try:
            yield
        except GroupError as error:
            if isinstance(error, ServerHalted) or str(error).startswith(peer_name(SERVER)):
                cause, error.remedy = _explanation(error)
                error.cause = f"The gradient server at {self._server} {cause}"
            raise

    def _average(self, mine: Floats, operation: str) -> Floats:
        """The mean of the next part. When the server halts, the run will find the same fault: until the end of the step
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
        """Exchange empty gradients for components that the model lacks."""
        while self._next < len(self._parts) and not self._parts[self._next][1]:
            self._exchange(np.empty(0, np.float32))
        if self._next == len(self._parts):
            self._next = 0
            self._step += 1

    def _exchange(self, mine: Floats) -> Floats:
        part, _ = self._parts[self._next]
        assert part.length == len(mine), (part, len(mine))
        self._next += 1
        return self.client.average_part(replace(part, step=self._step), mine)


def _explanation(error: GroupError) -> tuple[str, str]:
    """The cause of a server's error, as a predicate, and the remedy."""
    if isinstance(error, ServerHalted):
        return "found a gradient that is not finite", "Look at halt.json in the server's folder"
    if ShardAssignment.__name__ in str(error):
        return "assigns samples, as for fine-tuning", "Start it without --samples, then this command: it resumes"
    if isinstance(error, ProtocolError):
        return "does not follow protocol 2", "Use `andon gradient-server`, or fix the other implementation"
    return "has ended or cannot be reached", "Start `andon gradient-server` again, then this command: it resumes"
