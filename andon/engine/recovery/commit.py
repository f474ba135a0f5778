"""Commit and catch-up as a state machine, without a clock, tensors or messages.

    computing → reduced → committed → computing …

A step is *reduced* on a worker when its gradients are summed there and only the *verdict* (the totals of the step, and
whether to update) is missing. The verdict comes out of the last exchange of the step, which no worker completes before
all have begun it. So when any worker has the verdict of a step, every worker of the generation has that step reduced,
and can update as soon as it receives the verdict. It keeps the reduced gradients until the next step begins.

The members of a new generation exchange their *standings*. From the same standings all of them derive the same
`Recovery` (`plan_recovery`): the newest step that any of them has committed counts. A worker that has it only reduced
is *late*: it receives the verdict and updates. A worker that has nothing is *new*: it receives weights and optimizer
state from the workers that hold them. If nobody holds some part of the state, it is *lost*: all go back to the newest
checkpoint.

Each worker also keeps the last *records* of what it has committed until they are certain to be in the run's ledger: the
rank that reports them may be lost before its report is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Range = tuple[int, int]
"""Elements [lo, hi) of the arena."""
CHUNK_ELEMENTS = 1 << 20
"""The most elements that one worker sends before the next holder has its turn."""
RECORDS = 4096
"""Records that a worker keeps: more than it commits in the seconds until a silent coordinator counts as lost."""


@dataclass(frozen=True)
class Standing:
    """Where a worker is when a generation begins."""

    step: int = 0
    """The last step that it has committed."""
    verdict: Any = None
    """The verdict of that step (JSON)."""
    reduced: bool = False
    """Whether it has the step after that reduced."""
    held: tuple[Range, ...] = ()
    """The parts of which it has weights and optimizer state; none: it is new."""
    records: Mapping[int, Any] = field(default_factory=dict)
    """By step (JSON): records of committed steps that the ledger may lack."""

    def fields(self) -> list[Any]:
        """As JSON."""
        return [self.step, self.verdict, self.reduced, self.held, list(self.records.items())]

    @classmethod
    def of(cls, fields: Sequence[Any]) -> Standing:
        """From JSON."""
        step, verdict, reduced, held, records = fields
        return cls(step, verdict, reduced, tuple((lo, hi) for lo, hi in held), dict(records))


class Commit:
    """How far one worker has come with the current step."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.verdict: Any = None
        self.reduced = False
        self.records: dict[int, Any] = {}

    def begin(self) -> None:
        """The next step begins, for the first time or again."""
        self.reduced = False

    def enter_last_exchange(self) -> None:
        """The step is reduced: only its verdict is missing."""
        self.reduced = True

    def decide(self, verdict: Any, record: Any = None) -> None:
        """Commit the step on this worker: its verdict is known."""
        assert self.reduced, "a verdict on a step that is not reduced"
        self.step, self.verdict, self.reduced = self.step + 1, verdict, False
        self.records[self.step] = record
        self.records.pop(self.step - RECORDS, None)

    def go_back(self, step: int) -> None:
        """Continue from a checkpoint."""
        self.step, self.verdict, self.reduced = step, None, False
        self.records = {number: record for number, record in self.records.items() if number <= step}

    def records_of(self, first: int, last: int) -> list[Any]:
        """The records of some of the steps, as far as this worker has them."""
        return [self.records[step] for step in range(first, last + 1) if step in self.records]

    def standing(self, held: Iterable[Range], recorded: int) -> Standing:
        """What this worker brings to the next generation; `recorded` is the last step that the ledger has."""
        records = {step: record for step, record in self.records.items() if step > recorded}
        return Standing(self.step, self.verdict, self.reduced, tuple(held), records)

    def catch_up(self, recovery: Recovery, rank: int, record: Any = None) -> None:
        """Move to the step at which all members continue; if the state is lost, `go_back` follows."""
        if rank in recovery.late:
            self.decide(recovery.verdict, record)
        if not recovery.lost:
            self.step, self.verdict, self.reduced = recovery.step, recovery.verdict, False
        self.records = {**recovery.records, **self.records}


@dataclass(frozen=True)
class Recovery:
    """How a generation continues, derived from the standings of its members."""

    step: int
    """The step after which all continue, unless the state is lost."""
    verdict: Any
    late: frozenset[int]
    """Ranks that receive the verdict and update."""
    new: frozenset[int]
    """Ranks that receive everything."""
    transfers: tuple[tuple[int, int, int], ...]
    """(lo, hi, rank): the rank sends elements [lo, hi); elements that every rank holds are not sent."""
    lost: bool
    records: Mapping[int, Any] = field(default_factory=dict)
    """Records of all members that the ledger may lack."""


def plan_recovery(standings: Sequence[Standing], size: int) -> Recovery:
    """Derive the recovery from the standings of all ranks, for an arena of `size` elements."""
    known = [standing for standing in standings if standing.held]
    records = {step: record for each in standings for step, record in each.records.items()}
    if not known:
        return Recovery(0, None, frozenset(), frozenset(range(len(standings))), (), lost=True, records=records)
    newest = max(known, key=lambda standing: standing.step)
    late = {rank for rank, each in enumerate(standings) if each.held and each.step == newest.step - 1 and each.reduced}
    current = {rank for rank, each in enumerate(standings) if each.held and each.step == newest.step}
    new = set(range(len(standings))) - late - current
    held = [() if rank in new else standing.held for rank, standing in enumerate(standings)]
    transfers = _transfers(held, size)
    lost = transfers is None
    return Recovery(newest.step, newest.verdict, frozenset(late), frozenset(new), transfers or (), lost, records)


def _transfers(held: Sequence[Sequence[Range]], size: int) -> tuple[tuple[int, int, int], ...] | None:
    """Who sends what: the holders of an element take turns by chunk. None if nobody holds some element."""
    bounds = {bound for ranges in held for each in ranges for bound in each}
    cuts = sorted({0, size, *range(0, size, CHUNK_ELEMENTS)} | bounds)
    found = []
    turn = 0
    for lo, hi in pairwise(cuts):
        holders = [rank for rank, ranges in enumerate(held) if any(a <= lo and hi <= b for a, b in ranges)]
        if not holders:
            return None
        if len(holders) < len(held):
            found.append((lo, hi, holders[turn % len(holders)]))
            turn += 1
    return tuple(found)
