"""The progress of a run: what a checkpoint's `state.json` restores besides weights and optimizer state."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """The counters of a run, the same on every rank."""

    step: int = 0
    """The last committed step."""
    loss: float = math.nan
    """Of the last step."""
    tokens: int = 0
    skipped: int = 0
    """Steps without an update, because a gradient was not finite."""
    skips_in_a_row: int = 0

    def committed(self, loss: float, tokens: int, updated: bool) -> None:
        """Count a committed step, with an update or without."""
        self.step += 1
        self.loss = loss
        self.tokens += tokens
        self.skipped += not updated
        self.skips_in_a_row = 0 if updated else self.skips_in_a_row + 1

    @property
    def updates(self) -> int:
        """The number of updates that the optimizer has made."""
        return self.step - self.skipped

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"loss": self.loss if math.isfinite(self.loss) else None}

    def restore(self, fields: Mapping[str, Any]) -> None:
        """Restore the counters from `fields`."""
        self.step, self.tokens = fields["step"], fields["tokens"]
        self.loss = math.nan if fields["loss"] is None else fields["loss"]
        self.skipped, self.skips_in_a_row = fields["skipped"], fields["skips_in_a_row"]
