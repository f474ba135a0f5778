"""What goes round in a ring: the pieces of an operation in order.

Each chunk is cut into *stretches* of a few pieces, and a *stripe* is one stretch of every chunk. The ring
finishes one stripe after the other: a stripe is small enough to stay in the cache until it has been all the
way round, and a stretch long enough to keep the neighbours busy meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from andon.group.forms import SLOTS, STRETCH, Span


def check_bounds(bounds: Sequence[int], count: int, world_size: int) -> None:
    """Refuse bounds that do not cut `count` elements into a part per rank."""
    whole = len(bounds) == world_size + 1 and bounds[0] == 0 and bounds[-1] == count
    if not whole or any(lo > hi for lo, hi in pairwise(bounds)):
        raise ValueError(f"{list(bounds)} does not cut {count} elements into {world_size} parts")


class Route:
    """The pieces that leave and arrive when `chunks[0]` is sent and each of the others is received and, but
    for the last, passed on."""

    def __init__(self, bounds: Sequence[int], chunks: Sequence[int], step: int) -> None:
        self.leaving: list[Span] = []
        self.sources: list[int] = []  # which arrived piece each leaving one is; -1: my own
        self.arriving: list[Span] = []
        self.turns: list[int] = []  # in which round each piece arrives
        self._leaves_as: list[int] = []  # which leaving piece each arrived one becomes; -1: it stays
        self._ready = self._room = 0
        longest = max(hi - lo for lo, hi in pairwise(bounds))
        for start in range(0, longest, STRETCH * step):
            for turn, chunk in enumerate(chunks):
                lo, hi = bounds[chunk] + start, min(bounds[chunk] + start + STRETCH * step, bounds[chunk + 1])
                spans = [(at, min(at + step, hi)) for at in range(lo, hi, step)]
                self._add(turn, turn == len(chunks) - 1, spans)

    def _add(self, turn: int, last: bool, spans: list[Span]) -> None:
        if not last:
            arrived = range(len(self.arriving), len(self.arriving) + len(spans))
            self.sources += arrived if turn else [-1] * len(spans)
        if turn:
            leaving = range(len(self.leaving), len(self.leaving) + len(spans))
            self._leaves_as += [-1] * len(spans) if last else leaving
            self.arriving += spans
            self.turns += [turn - 1] * len(spans)
        if not last:
            self.leaving += spans

    def ready(self, arrived: int) -> int:
        """How many pieces may leave once so many have arrived."""
        while self._ready < len(self.leaving) and self.sources[self._ready] < arrived:
            self._ready += 1
        return self._ready

    def room(self, left: int) -> int:
        """How many pieces may arrive once so many have left, if each waits in a slot for that."""
        while self._room < len(self.arriving) and (
            self._room < SLOTS or self._leaves_as[self._room - SLOTS] < left
        ):
            self._room += 1
        return self._room
