"""Commit and catch-up as a state machine: no clock, no tensor, no message of its own.

    computing → reduced → committed → computing …

A step is *reduced* on a worker when its gradients are summed there and only the *verdict* (the totals of the step, and
whether to update) is missing. The verdict comes out of the last exchange of the step, which nobody completes before
everybody has begun it. So when any worker has the verdict of a step, every worker of the generation has that step
reduced, and can update as soon as it is told the verdict. It keeps what it has reduced until the next step begins.

The members of a new generation exchange their *standings*. From the same standings every one of them draws the same
conclusion (`settle`): the newest step that any of them has committed counts. A worker that has it only reduced is
*late* and takes over the verdict. A worker that has nothing is *new* and receives weights and optimizer state from
those who hold them. If nobody holds some part of the state, it is *lost*: all go back to the newest checkpoint.

Each worker also keeps the last *records* of what it has committed, until they are sure to be in the run's ledger: the
rank that reports them may be lost before its report has left it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Range = tuple[int, int]
"""Elements [lo, hi) of the arena."""
PIECE = 1 << 20
"""Elements that one worker sends before the next one has its turn."""
RECORDS = 4096
"""Records that a worker keeps: more than it commits in the seconds until a silent link to the coordinator is missed."""


@dataclass(frozen=True)
class Standing:
    """Where a worker is when a generation begins."""

    step: int = 0
    """The last step that it has committed."""
    verdict: Any = None
    """Of that step (JSON)."""
    reduced: bool = False
    """Whether it has the step after that reduced."""
    held: tuple[Range, ...] = ()
    """Of which parts it has weights and optimizer state; none: it is new."""
    records: Mapping[int, Any] = field(default_factory=dict)
    """By step: what it has committed, and the ledger may not have (JSON)."""

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
        """The next step begins, perhaps once more."""
        self.reduced = False

    def enter_last_exchange(self) -> None:
        """All that the next step needs is here, except the verdict."""
        self.reduced = True

    def decide(self, verdict: Any, record: Any = None) -> None:
        """The verdict of the step is here: it is committed on this worker."""
        assert self.reduced, "a verdict on a step that is not reduced"
        self.step, self.verdict, self.reduced = self.step + 1, verdict, False
        self.records[self.step] = record
        self.records.pop(self.step - RECORDS, None)

    def go_back(self, step: int) -> None:
        """Go on from a checkpoint."""
        self.step, self.verdict, self.reduced, self.records = step, None, False, {}

    def standing(self, held: Iterable[Range], recorded: int) -> Standing:
        """What this worker brings to the next generation; `recorded` is the last step that the ledger has."""
        records = {step: record for step, record in self.records.items() if step > recorded}
        return Standing(self.step, self.verdict, self.reduced, tuple(held), records)

    def catch_up(self, settled: Settlement, rank: int, record: Any = None) -> None:
        """Conclude alike with all other members; if the state is lost, `go_back` follows."""
        if rank in settled.late:
            self.decide(settled.verdict, record)
        if not settled.lost:
            self.step, self.verdict, self.reduced = settled.step, settled.verdict, False
        self.records = {**settled.records, **self.records}


@dataclass(frozen=True)
class Settlement:
    """What all members of a generation conclude from their standings."""

    step: int
    """The step after which all go on, unless the state is lost."""
    verdict: Any
    late: frozenset[int]
    """Ranks that take over the verdict and update."""
    new: frozenset[int]
    """Ranks that receive everything."""
    transfers: tuple[tuple[int, int, int], ...]
    """(lo, hi, rank): which rank sends which elements; those that every rank holds are not sent."""
    lost: bool
    records: Mapping[int, Any] = field(default_factory=dict)
    """What any of them has committed, and the ledger may not have."""


def settle(standings: Sequence[Standing], size: int) -> Settlement:
    """The conclusion from the standings of all ranks, for an arena of `size` elements."""
    known = [standing for standing in standings if standing.held]
    if not known:
        return Settlement(0, None, frozenset(), frozenset(range(len(standings))), (), lost=True)
    newest = max(known, key=lambda standing: standing.step)
    late = {rank for rank, each in enumerate(standings) if each.held and each.step == newest.step - 1 and each.reduced}
    new = {
        rank for rank, each in enumerate(standings) if rank not in late and not (each.held and each.step == newest.step)
    }
    held = [() if rank in new else standing.held for rank, standing in enumerate(standings)]
    transfers = _transfers(held, size)
    records = {step: record for each in known for step, record in each.records.items()}
    who = (frozenset(late), frozenset(new))
    return Settlement(newest.step, newest.verdict, *who, transfers or (), transfers is None, records)


def _transfers(held: Sequence[Sequence[Range]], size: int) -> tuple[tuple[int, int, int], ...] | None:
    """Who sends what, the holders of a part in turn; None if a part is held by nobody."""
    cuts = sorted({0, size, *range(0, size, PIECE), *(bound for ranges in held for each in ranges for bound in each)})
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
