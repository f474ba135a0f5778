"""The save protocol as a state machine, without clock, files or threads.

    training → requested → synced → writing → complete → training

A save is *requested* on every rank at the same step. Each rank copies what it will write and *acks* with the
digests of its weights, one per unit. Once every rank has acked with equal digests the ranks are *synced*, and
each begins *writing* its files. Once every rank *wrote*, rank 0 publishes the checkpoint and the save is
*complete*. Acks are counted by distinct rank, and each names its *turn* (the number of the request), so that a
repeated ack, or a late ack of an earlier save, does not count for another.

A rank that fails reports that instead of its ack. The save is then *aborted*: the phase is training again, and the
reason is kept. This happens when all ranks have reported (so that none still writes), and at once when digests
differ, a rank is lost or the deadline has passed. Every rank runs this machine on the same statuses in the same
order, so that all are in the same phase at the same step.
"""

from enum import StrEnum

Digests = tuple[str, ...]


class Phase(StrEnum):
    """The state of a save."""

    TRAINING = "training"
    REQUESTED = "requested"
    SYNCED = "synced"
    WRITING = "writing"
    COMPLETE = "complete"


class Save:
    """The save of a group of ranks, which may take `seconds` at most."""

    def __init__(self, world_size: int, seconds: float) -> None:
        self.world_size, self.seconds = world_size, seconds
        self.phase = Phase.TRAINING
        self.turn = 0
        self.step = 0
        self.reason = ""
        """Why the last save was aborted; empty if it was not."""
        self.differing: tuple[int, ...] = ()
        """Indices of the digests that differed between ranks, if that was the reason."""
        self.acks: dict[int, Digests] = {}
        self.failures: dict[int, str] = {}
        self._wrote: set[int] = set()
        self._deadline: float | None = None

    @property
    def running(self) -> bool:
        """Whether a save is in progress."""
        return self.phase is not Phase.TRAINING

    @property
    def awaited(self) -> list[int]:
        """The ranks that have not reported in this phase."""
        if self.phase not in (Phase.REQUESTED, Phase.WRITING):
            return []
        reported = self.failures.keys() | (self.acks.keys() if self.phase is Phase.REQUESTED else self._wrote)
        return [rank for rank in range(self.world_size) if rank not in reported]

    @property
    def all_wrote(self) -> bool:
        """Whether every rank's files are on disk, so that rank 0 may publish."""
        return self.phase is Phase.WRITING and len(self._wrote) == self.world_size

    def request(self, step: int) -> bool:
        """Begin to save a step; False: another save is in progress."""
        if self.running:
            return False
        self.phase, self.step, self.turn = Phase.REQUESTED, step, self.turn + 1
        self.reason, self.differing, self._deadline = "", (), None
        self.acks, self.failures, self._wrote = {}, {}, set()
        return True

    def ack(self, rank: int, turn: int, digests: Digests) -> None:
        """A rank has copied its part, and reports the digests of its weights."""
        if self._counts(rank, turn, Phase.REQUESTED):
            self.acks[rank] = digests
            self._advance()

    def begin_writing(self) -> None:
        """Every rank begins to write: all are synced."""
        assert self.phase is Phase.SYNCED, self.phase
        self.phase = Phase.WRITING

    def wrote(self, rank: int, turn: int) -> None:
        """A rank's files are on disk."""
        if self._counts(rank, turn, Phase.WRITING):
            self._wrote.add(rank)
            self._advance()

    def fail(self, rank: int, turn: int, reason: str) -> None:
        """A rank could not do its part, or rank 0 could not publish."""
        if turn != self.turn or self.phase not in (Phase.REQUESTED, Phase.WRITING):
            return
        if self.all_wrote and rank == 0:
            self.abort(f"rank {rank}: {reason}")
        elif rank in self.awaited:
            self.failures[rank] = reason
            self._advance()

    def complete(self, turn: int) -> None:
        """Rank 0 has published the checkpoint."""
        if self.all_wrote and turn == self.turn:
            self.phase = Phase.COMPLETE

    def resume(self) -> None:
        """Every rank knows that the save is complete."""
        assert self.phase is Phase.COMPLETE, self.phase
        self.phase = Phase.TRAINING

    def check_deadline(self, now: float) -> None:
        """Abort a save whose deadline has passed; its time starts with the first call."""
        if self._deadline is None:
            self._deadline = now + self.seconds
        if now > self._deadline and self.running and self.phase is not Phase.COMPLETE:
            late = ", ".join(map(str, self.awaited)) or "0"
            self.abort(f"rank {late} did not finish {self.phase} within {self.seconds:g} s")

    def abort(self, reason: str) -> None:
        """Give up the save, and return to training; a save that is complete stays so."""
        if self.running and self.phase is not Phase.COMPLETE:
            self.phase, self.reason = Phase.TRAINING, reason

    def _counts(self, rank: int, turn: int, phase: Phase) -> bool:
        return turn == self.turn and self.phase is phase and rank in self.awaited

    def _advance(self) -> None:
        """Once every rank has reported, enter the next phase or abort."""
        if self.awaited:
            return
        if self.failures:
            self.abort("; ".join(f"rank {rank}: {why}" for rank, why in sorted(self.failures.items())))
        elif self.phase is Phase.REQUESTED:
            columns = zip(*self.acks.values(), strict=True)
            self.differing = tuple(index for index, column in enumerate(columns) if len(set(column)) > 1)
            if self.differing:
                self.abort("the ranks hold different weights")
            else:
                self.phase = Phase.SYNCED
