"""Groups within one process: one worker alone, or several workers that are threads.

Threads exchange references: at a *meeting* each lays its word on the table and takes everybody's once all
have come. A collective is a meeting with the tensors as words, the work, and a meeting to part, before which
no one may touch what another still reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from andon.engine.order import Order
from andon.transport.base import Group, GroupTimeout, PeerLost, first_row, one_node_each, rows_of


class LocalGroup(Group):
    """World size one: nothing to exchange, the rows are still added in the one order."""

    rank = 0
    world_size = 1

    def reduce_scatter(self, nodes: torch.Tensor, bounds: Sequence[int], order: Order | None = None) -> None:
        order = order or one_node_each(1)
        order.add_up(rows_of(nodes, order, 0))

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int]) -> None:
        pass

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def close(self) -> None:
        pass


def thread_groups(world_size: int, timeout: float = 60.0) -> list[Group]:
    """The groups of `world_size` threads of this process, by rank."""
    meeting = _Meeting(world_size)
    return [ThreadGroup(meeting, rank, timeout) for rank in range(world_size)]


class ThreadGroup(Group):
    """One of several workers that are threads of one process."""

    def __init__(self, meeting: _Meeting, rank: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, meeting.world_size, timeout
        self._meeting = meeting

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

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        words: list[bytes] = self._meet(data, "gather of bytes")
        return words

    def close(self) -> None:
        self._meeting.leave(self.rank)

    def _meet(self, word: object, operation: str) -> list[Any]:
        return self._meeting.meet(self.rank, word, operation, self.timeout)


class _Meeting:
    """Where the threads of a group meet, turn by turn; no one can be two turns ahead of another."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._turns = [0] * world_size
        self._tables: list[list[Any]] = [[None] * world_size, [None] * world_size]
        self._gone: set[int] = set()

    def meet(self, rank: int, word: object, operation: str, timeout: float) -> list[Any]:
        """Lay down a word and take everybody's."""
        started = time.monotonic()
        with self._changed:
            turn = self._turns[rank] + 1
            table = self._tables[turn % 2]
            table[rank] = word
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
