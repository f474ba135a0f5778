"""`model.steps`: the steps of a script, while workers are lost and join.

A `for` loop cannot repeat a step after an exception. So where a group can be replaced, `optimizer.step` does not raise
when a worker is lost: it returns totals that are not `committed`, and before the next iteration the members of the run
enter their next generation. Then the loop gets the step that follows the last committed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from andon.engine.progress import Progress
from andon.engine.recovery.commit import Commit
from andon.transport.base import GroupError
from andon.transport.changing import ChangingGroup


class StepEnder(Protocol):
    """The part of an optimizer that `steps` uses."""

    progress: Progress
    commit: Commit
    loads: int
    goes_on: bool
    failure: GroupError | None
    before_end: Callable[[], None]
    model: Any
    change: Any


def steps(optimizer: StepEnder, start: int, end: int) -> Iterator[int]:
    """The numbers from `start` to `end` (exclusive); each is repeated until its step is committed."""
    progress, group = optimizer.progress, optimizer.model.membership.group
    offset = start - progress.step
    changing = group if isinstance(group, ChangingGroup) else None
    if changing:
        changing.begin_loop(offset, end)
    optimizer.goes_on = changing is not None

    def report(until: int) -> None:
        """Report the steps that every rank has committed, for the ledger."""
        if changing and changing.reported < until:
            if group.rank == 0:
                changing.report(optimizer.commit.records_of(changing.reported + 1, until))
            changing.reported = until

    if changing and changing.joins:
        changing.go_on(optimizer, None)
    try:
        while True:
            before, loads = progress.step, optimizer.loads
            try:
                if before + offset >= end:
                    optimizer.before_end()
                    optimizer.model.group.barrier()  # until all have committed the last step
                    report(before)
                    if changing:
                        changing.in_loop = False
                    return
                optimizer.model.before_step()
            except GroupError as error:
                optimizer.failure = error
            if not optimizer.failure:
                yield before + offset
                if not optimizer.failure and (progress.step, optimizer.loads) == (before, loads):
                    raise RuntimeError(
                        f"step {before + offset} was not ended: call optimizer.step() once in every step"
                    )
            report(progress.step - 1)  # a rank takes part in a step only after it has committed the one before
            if changing and (optimizer.failure or optimizer.change.agreed):
                failure, optimizer.failure = optimizer.failure, None
                changing.go_on(optimizer, failure)
            elif optimizer.failure:
                raise optimizer.failure
    finally:
        optimizer.goes_on = False
