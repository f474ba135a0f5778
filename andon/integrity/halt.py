"""The cord: a halt stops every rank at the same step, with the weights of the last committed step.

A *finding* is one bad gradient or loss: the rank that computed it, its samples, and what exactly is wrong. When the
ranks agree that a step is not sound, every rank computes its slots again, one by one, from the same weights and
samples, and inspects every gradient. The findings of all ranks are gathered before the halt is raised, so that every
rank raises the same halt.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from andon.transport.base import Group

MOST_BYTES: Final = 1 << 19
"""Of all findings of a halt, as JSON; a control link takes messages twice as long."""


@dataclass(frozen=True)
class Flaw:
    """What is wrong with one tensor: how many elements are not finite, the first of them, NaN or Inf."""

    parameter: str
    count: int
    first: int
    kind: str


@dataclass(frozen=True)
class Finding(Flaw):
    """A flaw and its origin. No slot: the flaw did not appear again when the slots were computed again."""

    rank: int
    host: str
    slot: int | None
    samples: list[int | str]
    """Numbers of windows, or lines of a file."""
    unit: str

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.host}"
        if self.slot is None:
            return f"{where}: {self.kind} in {self.unit}, not seen when computed again (a passing fault?)"
        amount = f"{self.count:,} elements, first at {self.first:,}"
        return f"{where}, slot {self.slot}: {self.kind} in {self.parameter} ({amount})"


class JidokaHalt(Exception):
    """The line stopped: the step, the cause and the findings. The weights are those of the step before."""

    def __init__(
        self, step: int, cause: str, findings: Sequence[Finding] = (), left_out: int = 0, sound: bool = True
    ) -> None:
        more = f"\n  and {left_out:,} more" if left_out else ""
        super().__init__(f"halted at step {step}: {cause}" + "".join(f"\n  {each}" for each in findings) + more)
        self.step, self.cause, self.findings, self.left_out = step, cause, tuple(findings), left_out
        self.sound = sound
        """Whether this rank's weights can be trusted (they cannot after a fingerprint mismatch)."""

    def fields(self) -> dict[str, Any]:
        """The fields of `halt.json`."""
        return {
            "step": self.step,
            "committed": self.step - 1,
            "cause": self.cause,
            "findings": [asdict(finding) for finding in self.findings],
            "left_out": self.left_out,
            "sound": self.sound,
        }


def find_flaw(name: str, values: Tensor) -> Flaw | None:
    """What is not finite in a tensor: how many elements, the first one, NaN or Inf."""
    bad = ~torch.isfinite(values.flatten())
    count = int(bad.sum())
    if not count:
        return None
    kinds = [kind for kind, test in (("NaN", torch.isnan), ("Inf", torch.isinf)) if bool(test(values).any())]
    return Flaw(name, count, int(bad.to(torch.uint8).argmax()), " and ".join(kinds))


def share_findings(group: Group, mine: Sequence[Finding]) -> tuple[list[Finding], int]:
    """The findings of all ranks, in the order of ranks and slots, and how many are left out.

    When a run diverges, every parameter has one in every slot, more than the report of a halt could hold."""
    fields = [asdict(finding) for finding in mine]
    ends = accumulate(len(json.dumps(each)) for each in fields)
    kept = fields[: max(1, sum(end <= MOST_BYTES // group.world_size for end in ends))]
    everyone = group.all_gather_json([kept, len(fields) - len(kept)])
    return [Finding(**each) for findings, _ in everyone for each in findings], sum(more for _, more in everyone)
