"""The cord: a halt stops every rank at the same step, with the weights of the last committed step.

A *finding* is one bad gradient or loss: who computed it, from which samples, and what exactly is wrong. When
the ranks agree that a step is not sound, every rank computes its slots again, one by one, from the same
weights and samples, and looks at every gradient. The findings of all ranks are collected before the halt is
raised, so that every rank raises the same one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from andon.transport.base import Group


@dataclass(frozen=True)
class Flaw:
    """What is wrong with one tensor: how many elements are not finite, the first of them, NaN or Inf."""

    name: str
    count: int
    first: int
    kind: str


@dataclass(frozen=True)
class Finding:
    """A flaw, and where it comes from. No slot: it was not there when the slots were computed again."""

    rank: int
    host: str
    slot: int | None
    samples: tuple[int, ...]
    unit: str
    flaw: Flaw

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.host}"
        if self.slot is None:
            return f"{where}: {self.flaw.kind} in {self.unit}, not seen when computed again (a passing fault?)"
        amount = f"{self.flaw.count:,} elements, first at {self.flaw.first:,}"
        return f"{where}, slot {self.slot}: {self.flaw.kind} in {self.flaw.name} ({amount})"

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        flaw = {"parameter": self.flaw.name, "count": self.flaw.count, "first": self.flaw.first}
        place = {"rank": self.rank, "host": self.host, "slot": self.slot, "samples": list(self.samples)}
        return {**place, "unit": self.unit, **flaw, "kind": self.flaw.kind}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Finding:
        """Back from JSON."""
        flaw = Flaw(fields["parameter"], fields["count"], fields["first"], fields["kind"])
        return cls(fields["rank"], fields["host"], fields["slot"], tuple(fields["samples"]), fields["unit"], flaw)


class JidokaHalt(Exception):
    """The line stopped: at which step, why, and what was found. Weights are those of the step before."""

    def __init__(self, step: int, cause: str, findings: Sequence[Finding] = (), sound: bool = True) -> None:
        super().__init__(f"halted at step {step}: {cause}" + "".join(f"\n  {finding}" for finding in findings))
        self.step, self.cause, self.findings = step, cause, tuple(findings)
        self.sound = sound
        """Whether this rank's weights can be trusted (they cannot after a fingerprint mismatch)."""

    def fields(self) -> dict[str, Any]:
        """What `halt.json` says."""
        findings = [finding.fields() for finding in self.findings]
        return {
            "step": self.step,
            "committed": self.step - 1,
            "cause": self.cause,
            "findings": findings,
            "sound": self.sound,
        }


@dataclass
class Inspection:
    """The flaws of one slot, gathered as its gradients arrive."""

    flaws: list[Flaw] = field(default_factory=list)

    def look(self, name: str, values: Tensor) -> None:
        """Note a tensor that is not finite."""
        if flaw := find_flaw(name, values):
            self.flaws.append(flaw)


def find_flaw(name: str, values: Tensor) -> Flaw | None:
    """What is not finite in a tensor: how many elements, the first one, NaN or Inf."""
    bad = ~torch.isfinite(values.flatten())
    count = int(bad.sum())
    if not count:
        return None
    kinds = [kind for kind, test in (("NaN", torch.isnan), ("Inf", torch.isinf)) if bool(test(values).any())]
    return Flaw(name, count, int(bad.to(torch.uint8).argmax()), " and ".join(kinds))


def share_findings(group: Group, mine: Sequence[Finding]) -> list[Finding]:
    """Everyone's findings, in the order of ranks and slots."""
    everyone = group.all_gather_bytes(json.dumps([finding.fields() for finding in mine]).encode())
    return [Finding.from_fields(fields) for data in everyone for fields in json.loads(data)]
