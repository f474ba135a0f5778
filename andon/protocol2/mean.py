"""The mean over workers, with the bits of the original server (C-WIRE-002).

The sum starts from 0.0, adds worker by worker in the order of their ids and is divided by their number, all in f32; so
the mean of −0.0 and −0.0 is 0.0. This is not the order of `andon.engine.gradients.order`, which workers of another
implementation do not know. The loss is Σ loss·total / Σ total, also in f32, and 0.0 without samples. Unlike the
original server, this one detects a sum that overflows before it is sent (F-DP-003).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from andon.transport.base import GroupError
from andon.transport.tcp.frames import Floats

CHUNK_FLOATS: Final = 1 << 16
"""Added at once: they stay in the cache of a core."""


@dataclass(frozen=True)
class NonFinite:
    """The non-finite elements of a vector: their number, the first of them, and whether they are NaN or Inf."""

    count: int
    first: int
    kind: str


class NonFiniteGradient(GroupError):
    """A gradient is not finite: halt before it reaches a weight (F-DP-003). `rank` is the worker's id."""

    def __init__(
        self, rank: int, step: int, where: str, flaw: NonFinite, what: str = "sent a non-finite gradient"
    ) -> None:
        amount = f"{flaw.kind}, {flaw.count:,} elements, first at {flaw.first:,}"
        super().__init__(f"halt: worker {rank} {what} at step {step} ({where}): {amount}")
        self.rank, self.step, self.where, self.flaw = rank, step, where, flaw


def find_non_finite(values: Floats) -> NonFinite | None:
    """The non-finite elements of a vector, if there are any."""
    count, first, kinds = 0, 0, set[str]()
    for lo in range(0, len(values), CHUNK_FLOATS):
        chunk = values[lo : lo + CHUNK_FLOATS]
        bad = ~np.isfinite(chunk)
        if bad.any():
            first = first if count else lo + int(bad.argmax())
            count += int(bad.sum())
            kinds |= {"NaN" if np.isnan(value) else "Inf" for value in chunk[bad][:1000]}
    return NonFinite(count, first, " and ".join(sorted(kinds, reverse=True))) if count else None


def mean_of(vectors: Mapping[int, Floats], step: int, where: str) -> Floats:
    """The mean of the workers' vectors, by id. Each is finite; raises `NonFiniteGradient` if their sum is not."""
    rows = [vectors[worker] for worker in sorted(vectors)]
    mean = np.empty(len(rows[0]), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for lo in range(0, len(mean), CHUNK_FLOATS):
            into = mean[lo : lo + CHUNK_FLOATS]
            np.add(rows[0][lo : lo + CHUNK_FLOATS], np.float32(0), out=into)
            for row in rows[1:]:
                np.add(into, row[lo : lo + CHUNK_FLOATS], out=into)
            if not np.isfinite(into).all():
                raise _overflow(vectors, step, where)
            np.divide(into, np.float32(len(rows)), out=into)
    return mean


def global_loss(records: Mapping[int, tuple[float, int]], step: int) -> float:
    """The loss over all samples, from each worker's finite loss and number of samples, by id. Raises
    `NonFiniteGradient` if it is not finite."""
    total, samples = np.float32(0), 0
    with np.errstate(over="ignore"):
        for worker in sorted(records):
            loss, count = records[worker]
            total += np.float32(loss) * np.uint64(count).astype(np.float32)
            samples += count
            if not np.isfinite(total):
                raise NonFiniteGradient(worker, step, "loss", NonFinite(1, 0, "Inf"), "makes the mean loss non-finite")
        return float(total / np.float32(samples)) if samples else 0.0


def _overflow(vectors: Mapping[int, Floats], step: int, where: str) -> NonFiniteGradient:
    """The error for a sum that is not finite: names the worker whose gradient made it so."""
    total = np.zeros(len(next(iter(vectors.values()))), np.float32)
    for worker in sorted(vectors):
        total += vectors[worker]
        if flaw := find_non_finite(total):
            what = "makes the sum of finite gradients non-finite"
            return NonFiniteGradient(worker, step, where, flaw, what)
    raise AssertionError("the sum is finite")
