"""A group whose ranks are threads of one process: for tests of what is above the transports.

Threads exchange references. At a meeting each leaves a value and takes everybody's once all have come. A
collective is a meeting with the tensors as values, the work, and a meeting at the end, before which no rank
may change what another still reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from andon.engine.gradients.order import Order
from andon.transport.base import Group, GroupTimeout, PeerLost, Rendezvous, Settings
from andon.transport.rows import first_row, one_node_each, rows_of


def thread_groups(world_size: int, timeout: float = 60.0) -> list[Group]:
    """The groups of `world_size` threads of this process, by rank."""
    meeting = Meeting(world_size)
    return [ThreadGroup(meeting, rank, timeout) for rank in range(world_size)]


class ThreadGroup(Group):
    """One of several workers that are threads of one process."""

    def __init__(self, meeting: Meeting, rank: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, meeting.world_size, timeout
        self._meeting = meeting

    @classmethod
    def open(cls, rendezvous: Rendezvous, settings: Settings) -> ThreadGroup:
        raise NotImplementedError("thread_groups makes all ranks at once")

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        order = order or one_node_each(self.world_size)
        rows = self._meet(rows_of(nodes, order, self.rank), "reduce-scatter")
        lo, hi = bounds[self.rank], bounds[self.rank + 1]
        leaves = [rows[rank][row][lo:hi].clone() for rank, row in order.leaves]
        order.add_up(leaves)
        first_row(nodes)[lo:hi].copy_(leaves[0])
        self._meet(None, "reduce-scatter")

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        flats = self._meet(flat, "all-gather")
        for rank, (lo, hi) in enumerate(pairwise(bounds)):
            if rank != self.rank:
                flat[lo:hi].copy_(flats[rank][lo:hi])
        self._meet(None, "all-gather")

    def leave(self) -> None:
        self._meeting.leave(self.rank)

    def abort(self, rank: int, detail: str) -> None:
        self._meeting.leave(rank)

    def _meet(self, value: object, operation: str) -> list[Any]:
        return self._meeting.meet(self.rank, value, operation, self.timeout)


class Meeting:
    """Where the threads of a group meet, turn by turn; no one can be two turns ahead of another."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._turns = [0] * world_size
        self._tables: list[list[Any]] = [[None] * world_size, [None] * world_size]
        self._gone: set[int] = set()

    def meet(self, rank: int, value: object, operation: str, timeout: float) -> list[Any]:
        """Leave a value and take everybody's."""
        started = time.monotonic()
        with self._changed:
            turn = self._turns[rank] + 1
            table = self._tables[turn % 2]
            table[rank] = value
            self._turns[rank] = turn
            self._changed.notify_all()
            while late := [peer for peer, its_turn in enumerate(self._turns) if its_turn < turn]:
                seconds = time.monotonic() - started
                for peer in late:
                    if peer in self._gone:
                        raise PeerLost(peer, operation, seconds, "it left the group")
                if seconds >= timeout:
                    raise GroupTimeout(late[0], operation, seconds)
                self._changed.wait(timeout - seconds)
            return list(table)

    def leave(self, rank: int) -> None:
        """Tell everyone that this rank comes no more."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()
