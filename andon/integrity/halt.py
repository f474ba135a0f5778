"""The cord: a halt stops every rank at the same step, with the weights of the last committed step."""

from __future__ import annotations

import math
from typing import Any

from andon.gradients import Totals


class JidokaHalt(Exception):
    """The line stopped: what was wrong, where, and at which step."""

    def __init__(self, step: int, cause: str) -> None:
        super().__init__(f"halted at step {step}: {cause}; weights stay at step {step - 1}")
        self.step, self.cause = step, cause

    def fields(self) -> dict[str, Any]:
        """What `halt.json` says."""
        return {"step": self.step, "cause": self.cause}


def halt_unless_sound(step: int, totals: Totals) -> None:
    """Pull the cord if the loss or the gradient of a step is not finite (F-DP-003); alike on every rank."""
    if totals.sound:
        return
    what = "loss" if not math.isfinite(totals.loss) else "gradient norm"
    value = totals.loss if what == "loss" else totals.norm
    raise JidokaHalt(step, f"the {what} is {value}")
