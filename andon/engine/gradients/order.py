"""The one order of addition (C-ONE-001).

A step has S *slots*. Their gradients are summed as a binary tree that depends on S alone:
sum[lo, hi) = sum[lo, mid) + sum[mid, hi), where mid = lo + the largest power of two below hi - lo. A *node* is a pair
(lo, hi) of that tree. Each rank works on a contiguous range of slots and folds it into the largest complete nodes
inside the range. It keeps them on a stack of buffers; the position on the stack is the *row* of the buffer. A *leaf* is
one such node as contributed by its rank. The reduce adds the leaves in the order of `Order.adds`, so the sum has the
same bits as on one worker, for every number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Protocol

MOST_SLOTS: Final = 1 << 16
"""Of a step."""
Node = tuple[int, int]
Merges = tuple[tuple[int, int], ...]
"""(a, b): row b is added into row a."""


class Addable(Protocol):
    """Anything that adds in place: a tensor, an array."""

    def add_(self, other: Any, /) -> Any: ...


def middle(lo: int, hi: int) -> int:
    """Where the tree splits [lo, hi): after the largest power of two below its length."""
    return lo + (1 << (hi - lo - 1).bit_length() - 1)


def shares(total: int, world_size: int, grain: int = 1) -> list[int]:
    """Bounds of contiguous shares, sizes within one grain; share r is [bounds[r], bounds[r + 1])."""
    grains = -(-total // grain)
    return [min(total, rank * grains // world_size * grain) for rank in range(world_size)] + [total]


def cover(lo: int, hi: int, slots: int) -> list[Node]:
    """The largest complete nodes of the tree over `slots` that make up [lo, hi), from left to right."""

    def inside(a: int, b: int) -> list[Node]:
        if b <= lo or hi <= a:
            return []
        if lo <= a and b <= hi:
            return [(a, b)]
        mid = middle(a, b)
        return inside(a, mid) + inside(mid, b)

    return inside(0, slots) if lo < hi else []


@dataclass(frozen=True)
class Fold:
    """What one slot does to the stack: its gradient goes to `row`, then each merge adds row b into row a."""

    slot: int
    row: int
    accumulate: bool
    merges: Merges


@dataclass(frozen=True)
class Order:
    """Who contributes which nodes of a step, and the order in which they are added."""

    slots: int
    bounds: tuple[int, ...]
    nodes: tuple[tuple[Node, ...], ...]
    adds: tuple[tuple[int, int], ...]

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def leaves(self) -> list[tuple[int, int]]:
        """(rank, row) of each leaf, in the numbering of `adds`."""
        return [(rank, row) for rank, nodes in enumerate(self.nodes) for row in range(len(nodes))]

    def range_of(self, rank: int) -> range:
        """The slots of a rank: those of all ranks are disjoint and complete (C-SHARD-001)."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    def folds(self, rank: int, accumulate: bool = True) -> list[Fold]:
        """How a rank folds its slots into its nodes; `accumulate`: whether autograd may add to a row in place."""
        return _folds(self.bounds[rank], self.bounds[rank + 1], self.slots, accumulate)

    def rows(self, rank: int, accumulate: bool = True) -> int:
        """How many gradient buffers a rank needs while it folds (at least one)."""
        return 1 + max((fold.row for fold in self.folds(rank, accumulate)), default=0)

    def add_up(self, leaves: Sequence[Addable]) -> None:
        """Add the leaves in the one order, in place; the sum ends in the first. Also the oracle of the tests."""
        for into, other in self.adds:
            leaves[into].add_(leaves[other])


@lru_cache(maxsize=1024)
def make_order(slots: int, world_size: int) -> Order:
    """The order of a step with `slots` slots on `world_size` ranks, each with a contiguous share of them."""
    if not 1 <= world_size <= slots:
        raise ValueError(f"{world_size} workers cannot share {slots} slots: each needs at least one")
    if slots > MOST_SLOTS:
        raise ValueError(f"{slots} slots are more than {MOST_SLOTS}")
    return order_of_ranges(slots, tuple(shares(slots, world_size)))


@lru_cache(maxsize=1024)
def order_of_ranges(slots: int, bounds: tuple[int, ...]) -> Order:
    """The order of a step in which rank r works on slots [bounds[r], bounds[r + 1])."""
    nodes = tuple(tuple(cover(lo, hi, slots)) for lo, hi in pairwise(bounds))
    leaf_of = {node: leaf for leaf, node in enumerate(node for own in nodes for node in own)}
    adds: list[tuple[int, int]] = []

    def add(lo: int, hi: int) -> int:
        if (lo, hi) in leaf_of:
            return leaf_of[lo, hi]
        mid = middle(lo, hi)
        into, other = add(lo, mid), add(mid, hi)
        adds.append((into, other))
        return into

    add(0, slots)
    return Order(slots, bounds, nodes, tuple(adds))


def _folds(lo: int, hi: int, slots: int, may_accumulate: bool) -> list[Fold]:
    tree = _tree(slots)
    stack: list[Node] = []
    folds = []
    for slot in range(lo, hi):
        # A slot whose left sibling is on top of the stack is added to it by autograd.
        accumulate = may_accumulate and bool(stack) and (stack[-1][0], slot + 1) in tree
        if accumulate:
            stack[-1] = (stack[-1][0], slot + 1)
        else:
            stack.append((slot, slot + 1))
        row = len(stack) - 1
        merges = []
        while len(stack) > 1 and (stack[-2][0], stack[-1][1]) in tree:
            merges.append((len(stack) - 2, len(stack) - 1))
            stack[-2:] = [(stack[-2][0], stack[-1][1])]
        folds.append(Fold(slot, row, accumulate, tuple(merges)))
    return folds


@lru_cache(maxsize=64)
def _tree(slots: int) -> frozenset[Node]:
    """All nodes. Two nodes that follow each other are siblings if together they are a node."""

    def below(lo: int, hi: int) -> list[Node]:
        if hi - lo == 1:
            return [(lo, hi)]
        mid = middle(lo, hi)
        return [(lo, hi), *below(lo, mid), *below(mid, hi)]

    return frozenset(below(0, slots))
