"""The parts of an operation of a star (see `andon.transport.tcp.star`): whose they are, what the server adds
of them and sends, and what a rank does with that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
import torch

from andon.engine.order import Apart, Order, apart
from andon.transport.tcp import arithmetic as serial
from andon.transport.tcp.encoding import PIECE, Form, Scratch, Span, arithmetic
from andon.transport.tcp.frames import Floats

NOBODY: Final = -1
ITEM_SIZES: Final = {"float32": 4, "bf16": 2, "uint8": 1}


@dataclass(frozen=True)
class Part:
    """Elements [lo, hi), and the rank that owns them."""

    lo: int
    hi: int
    owner: int


def parts(name: str, bounds: Sequence[int], kind: str) -> list[Part]:
    """The parts of an operation, in order: the owners take turns, so that all links are busy."""
    step = 4 * PIECE if kind == "uint8" else PIECE
    if name == "all-reduce":
        bounds = (0, bounds[-1])
    found = [
        Part(at, min(at + step, hi), owner)
        for owner, (lo, hi) in enumerate(pairwise(bounds))
        for at in range(lo, hi, step)
    ]
    return sorted(found, key=lambda part: part.lo - bounds[part.owner])


def is_source(name: str, part: Part, rank: int) -> bool:
    """Whether a rank sends its values of a part."""
    return name == "all-reduce" or (rank == part.owner) == (name == "all-gather")


def is_target(name: str, part: Part, rank: int) -> bool:
    """Whether a rank gets the results of a part."""
    return name == "all-reduce" or (rank == part.owner) == (name == "reduce-scatter")


def adds_of(name: str, order: Order | None, owner: int) -> Apart:
    """What the server adds of a part, and which buffers it sends."""
    if order is None:
        return Apart((), (0,), ())
    return apart(order, owner if name == "reduce-scatter" else NOBODY)


def kind_of_sums(name: str, kind: str) -> str:
    """How sums travel: only a complete one may be rounded."""
    return "float32" if name == "reduce-scatter" else kind


def result_sizes(name: str, kind: str, adds: Apart) -> list[tuple[int, int]]:
    """The leaves whose buffers the server sends of a part, and the bytes of an element in each."""
    sums = adds.sums
    return [(leaf, ITEM_SIZES[kind_of_sums(name, kind) if leaf in sums else kind]) for leaf in adds.given]


class Results(Protocol):
    """What a rank receives in an operation."""

    count: int

    def room(self, index: int) -> memoryview:
        """Where the result with this index can arrive."""
        ...

    def arrived(self, index: int) -> None:
        """The result is there."""
        ...


class Arriving:
    """Results that are kept as they come."""

    def __init__(self, into: Form, spans: Sequence[Span]) -> None:
        self._into, self._spans, self.count = into, spans, len(spans)

    def room(self, index: int) -> memoryview:
        return self._into.incoming(self._spans[index], index, False)

    def arrived(self, index: int) -> None:
        self._into.arrived(self._spans[index], index, False, False)


class OwnParts:
    """My parts of a reduce-scatter: each sum of others' rows is added to mine as it comes, in the one order.
    With `fresh` the first of the rows only takes the sum, and counts for nothing itself."""

    def __init__(
        self,
        rows: Sequence[torch.Tensor],
        fresh: bool,
        adds: Apart,
        scratch: Scratch,
        into: Form,
        spans: Sequence[Span],
    ) -> None:
        self._rows = [row.numpy() for row in rows]
        self._fresh, self._scratch, self._spans = fresh, scratch, spans
        self._rounds = into.kind == "bf16"
        self._sizes = [size for _, size in result_sizes("reduce-scatter", into.kind, adds)]
        self.count = len(spans) * len(self._sizes)
        self._turns: list[list[tuple[int, int | None]]] = [[]]
        """What to add before the first sum, and with each of them."""
        for row, other in adds.own:
            self._turns += [[]] if other is None else []
            self._turns[-1].append((row, other))
        if not self._sizes:
            for span in spans:
                self._begin(span)
                self._end(span)

    def room(self, index: int) -> memoryview:
        part, turn = divmod(index, len(self._sizes))
        lo, hi = self._spans[part]
        return self._scratch.bytes[: self._sizes[turn] * (hi - lo)]

    def arrived(self, index: int) -> None:
        part, turn = divmod(index, len(self._sizes))
        span = self._spans[part]
        if turn == 0:
            self._begin(span)
        self._add(span, turn + 1, self._received(span[1] - span[0], rounded=self._sizes[turn] == 2))
        if turn + 1 == len(self._sizes):
            self._end(span)

    def _received(self, size: int, rounded: bool) -> Floats:
        floats = self._scratch.array.view(np.float32)
        if not rounded:
            return floats[:size]
        wide = floats[PIECE : PIECE + size]  # beside it
        arithmetic().widen(self._scratch.array.view(np.uint16)[:size], wide)
        return wide

    def _begin(self, span: Span) -> None:
        if self._fresh:
            self._rows[0][slice(*span)].fill(-0.0)  # what it is added to keeps its bits
        for row in self._rows if self._rounds else ():
            arithmetic().round_in_place(row[slice(*span)])
        self._add(span, 0, None)

    def _add(self, span: Span, turn: int, given: Floats | None) -> None:
        rows = [row[slice(*span)] for row in self._rows]
        for row, other in self._turns[turn]:
            term = given if other is None else rows[other]
            assert term is not None
            serial.add(rows[row], term)

    def _end(self, span: Span) -> None:
        if self._rounds:
            arithmetic().round_in_place(self._rows[0][slice(*span)])
