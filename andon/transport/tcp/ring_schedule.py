"""The schedule of a ring: which pieces a rank sends and receives in an operation, in which order.

The vector is cut into one chunk per rank, and a chunk into *pieces*. The schedule is tiled: a *tile* is a few pieces of
every chunk, and goes all the way round before the next tile begins. A tile is small enough to stay in the cache
meanwhile, and large enough to keep the neighbours busy.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from andon.transport.tcp.encoding import BUFFERS, TILE_PIECES, Span


class RingSchedule:
    """The pieces that a rank sends and receives when it sends `chunks[0]`, receives each of the others and passes all
    but the last one on."""

    def __init__(self, bounds: Sequence[int], chunks: Sequence[int], piece_size: int) -> None:
        self.leaving: list[Span] = []
        self.sources: list[int] = []  # the index with which each leaving piece arrived; -1: it is this rank's
        self.arriving: list[Span] = []
        self.rounds: list[int] = []  # the round in which each piece arrives
        leaves_as: list[int] = []  # the index with which each arrived piece leaves; -1: it stays
        tile = TILE_PIECES * piece_size
        for start in range(0, max(hi - lo for lo, hi in pairwise(bounds)), tile):
            for turn, chunk in enumerate(chunks):
                lo = bounds[chunk] + start
                hi = min(lo + tile, bounds[chunk + 1])
                spans = [(at, min(at + piece_size, hi)) for at in range(lo, hi, piece_size)]
                leaves_as += self._add(turn, turn == len(chunks) - 1, spans)
        self.may_leave = _gates(self.sources, len(self.arriving))
        """`may_leave[i]`: how many pieces may leave when i pieces have arrived."""
        self.may_arrive = _gates(([-1] * BUFFERS + leaves_as)[: len(self.arriving)], len(self.leaving))
        """`may_arrive[i]`: how many pieces may arrive when i have left, if each waits in a buffer until it leaves."""

    def _add(self, turn: int, last: bool, spans: list[Span]) -> Sequence[int]:
        """Append the pieces of one chunk in a tile; returns the indices with which arriving pieces will leave."""
        leaving = range(len(self.leaving), len(self.leaving) + len(spans))
        if not last:
            arriving = range(len(self.arriving), len(self.arriving) + len(spans))
            self.sources += arriving if turn else [-1] * len(spans)
            self.leaving += spans
        if not turn:
            return []
        self.arriving += spans
        self.rounds += [turn - 1] * len(spans)
        return [-1] * len(spans) if last else leaving


ring_schedule = lru_cache(maxsize=1024)(RingSchedule)
"""A schedule; cached, because every training step needs the same ones."""


def _gates(waits_for: Sequence[int], count: int) -> list[int]:
    """How many items of a sequence may go after 0, 1, … `count` events, if item i waits for event `waits_for[i]` and
    for the items before it."""
    needed = list(accumulate(waits_for, max))
    return [bisect_left(needed, happened) for happened in range(count + 1)]
