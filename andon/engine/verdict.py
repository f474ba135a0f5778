"""What all ranks agree on at the end of a step: its totals, whether to update, and votes such as to stop.

Every rank receives the same reports and computes the same verdict from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from andon.integrity.halt import JidokaHalt

NAMED: Final = 8
"""The most slots that a complaint names."""


class Report(NamedTuple):
    """What a rank sends to all ranks when its gradients are reduced (JSON)."""

    bad_units: Sequence[str]
    """The units to which this rank contributed a value that is not finite, as far as it was checked before the reduce
    (`integrity.finite`)."""
    losses: Sequence[tuple[int, float, int]]
    """(slot, loss summed over its tokens, tokens) of each of its slots."""
    statuses: Sequence[Any]
    """The status of each passenger."""
    fingerprints: str
    """Hexadecimal."""


@dataclass(frozen=True)
class Totals:
    """Loss, tokens and gradient norm of a step, the same on every rank."""

    loss: float
    """The mean over all tokens of the step."""
    tokens: int
    norm: float
    """Of the mean gradient, before clipping."""
    bad_units: tuple[tuple[int, str], ...] = ()
    """(rank, unit) of every contribution that was not finite."""
    bad_slots: tuple[int, ...] = ()
    """The slots whose loss is not finite."""
    committed: bool = True
    """False: a worker was lost before the verdict. `model.steps` gives the step again unless another rank has committed
    it."""
    gathered: bool = True
    """False: a worker was lost, so this rank has the weights before the step, or lacks some that others have updated.
    They are complete when `model.steps` gives the next step."""

    @classmethod
    def add_up(cls, reports: Sequence[Report], norm_of_sum: float) -> Totals:
        """Add up all ranks' reports, in the order of slots; `norm_of_sum` is that of the summed gradient."""
        losses = sorted(each for report in reports for each in report.losses)
        tokens = sum(count for _, _, count in losses)
        loss = sum(loss for _, loss, _ in losses) / max(1, tokens)
        norm = norm_of_sum / max(1, tokens)
        bad_units = tuple((rank, unit) for rank, report in enumerate(reports) for unit in report.bad_units)
        return cls(loss, tokens, norm, bad_units, tuple(slot for slot, each, _ in losses if not math.isfinite(each)))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Totals:
        """From JSON."""
        bad_units = tuple((rank, unit) for rank, unit in fields["bad_units"])
        return cls(**{**fields, "bad_units": bad_units, "bad_slots": tuple(fields["bad_slots"])})

    @property
    def sound(self) -> bool:
        """Whether the step may change the weights."""
        return not self.bad_units and math.isfinite(self.norm) and math.isfinite(self.loss)

    @property
    def complaint(self) -> str:
        """Why a step is not sound, in one line."""
        found = [f"rank {rank} computed a bad gradient of {unit}" for rank, unit in self.bad_units]
        if not math.isfinite(self.loss):
            slots = ", ".join(map(str, self.bad_slots[:NAMED])) + ", …" * (len(self.bad_slots) > NAMED)
            found.append(f"the loss is {self.loss}" + f" in slot {slots}" * bool(slots))
        return "; ".join(found) or f"every contribution is finite, but the norm of their sum is {self.norm}"


Judge = Callable[[int, Totals], bool]
"""(step, totals) → whether to update; raises `JidokaHalt` to stop the line. The same answer on every rank."""


def halt_unless_sound(step: int, totals: Totals) -> bool:
    """Stop the line on a loss or gradient that is not finite (F-DP-003)."""
    if not totals.sound:
        raise JidokaHalt(step, totals.complaint)
    return True


class Vote:
    """Whether any rank wants something after this step, such as to stop; a passenger of the step's exchange."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self.wanted, self.agreed = wanted, False

    def status(self) -> bool:
        return self.wanted()

    def receive(self, statuses: Sequence[bool]) -> None:
        self.agreed = any(statuses)
