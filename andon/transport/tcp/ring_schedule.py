"""What goes round in a ring: the pieces of an operation in order.

Each chunk is cut into *stretches* of a few pieces, and a *stripe* is one stretch of every chunk. The ring
finishes one stripe after the other: a stripe is small enough to stay in the cache until it has been all the
way round, and a stretch long enough to keep the neighbours busy meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from andon.transport.tcp.encoding import BUFFERS, TILE_PIECES, Span


class Route:
    """The pieces that leave and arrive when `chunks[0]` is sent and each of the others is received and, but
    for the last, passed on."""

    def __init__(self, bounds: Sequence[int], chunks: Sequence[int], step: int) -> None:
        self.leaving: list[Span] = []
        self.sources: list[int] = []  # which arrived piece each leaving one is; -1: my own
        self.arriving: list[Span] = []
        self.turns: list[int] = []  # in which round each piece arrives
        leaves_as: list[int] = []  # which leaving piece each arrived one becomes; -1: it stays
        longest = max(hi - lo for lo, hi in pairwise(bounds))
        for start in range(0, longest, TILE_PIECES * step):
            for turn, chunk in enumerate(chunks):
                lo, hi = (
                    bounds[chunk] + start,
                    min(bounds[chunk] + start + TILE_PIECES * step, bounds[chunk + 1]),
                )
                spans = [(at, min(at + step, hi)) for at in range(lo, hi, step)]
                leaves_as += self._add(turn, turn == len(chunks) - 1, spans)
        self.ready = _gates(self.sources, len(self.arriving))
        """How many pieces may leave once so many have arrived."""
        self.room = _gates(([-1] * BUFFERS + leaves_as)[: len(self.arriving)], len(self.leaving))
        """How many pieces may arrive once so many have left, if each waits in a slot for that."""

    def _add(self, turn: int, last: bool, spans: list[Span]) -> Sequence[int]:
        """Append the pieces of a stretch; as which leaving pieces those that arrive will be passed on."""
        leaving = range(len(self.leaving), len(self.leaving) + len(spans))
        if not last:
            arriving = range(len(self.arriving), len(self.arriving) + len(spans))
            self.sources += arriving if turn else [-1] * len(spans)
            self.leaving += spans
        if not turn:
            return []
        self.arriving += spans
        self.turns += [turn - 1] * len(spans)
        return [-1] * len(spans) if last else leaving


@lru_cache(maxsize=1024)
def route(bounds: tuple[int, ...], chunks: tuple[int, ...], step: int) -> Route:
    """A route, kept for the next time: a step of training takes the same ones as the step before."""
    return Route(bounds, chunks, step)


def _gates(waits_for: Sequence[int], count: int) -> list[int]:
    """How many of a sequence may go, if each waits for the one before it and for that event: after 0 events,
    after 1, and so on up to `count`."""
    gates, may_go = [], 0
    for happened in range(count + 1):
        while may_go < len(waits_for) and waits_for[may_go] < happened:
            may_go += 1
        gates.append(may_go)
    return gates
