"""The cord: a halt stops every rank at the same step, with the weights of the last committed step.

A *finding* is one bad gradient or loss: the rank that computed it, its samples, and what exactly is wrong. When the
ranks agree that a step is not sound, every rank computes its slots again, one by one, from the same weights and
samples, and inspects every gradient. The findings of all ranks are gathered before the halt is raised, so that every
rank raises the same halt.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from andon.transport.base import Group


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

    def __init__(self, step: int, cause: str, findings: Sequence[Finding] = (), sound: bool = True) -> None:
        super().__init__(f"halted at step {step}: {cause}" + "".join(f"\n  {finding}" for finding in findings))
        self.step, self.cause, self.findings = step, cause, tuple(findings)
        self.sound = sound
        """Whether this rank's weights can be trusted (they cannot after a fingerprint mismatch)."""

    def fields(self) -> dict[str, Any]:
        """The fields of `halt.json`."""
        return {
            "step": self.step,
            "committed": self.step - 1,
            "cause": self.cause,
            "findings": [asdict(finding) for finding in self.findings],
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


def share_findings(group: Group, mine: Sequence[Finding]) -> list[Finding]:
    """The findings of all ranks, in the order of ranks and slots."""
    everyone = group.all_gather_json([asdict(finding) for finding in mine])
    return [Finding(**fields) for findings in everyone for fields in findings]
