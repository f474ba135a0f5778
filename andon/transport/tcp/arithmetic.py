"""Arithmetic on one thread.

A transport works beside a computation that has the cores. An operation of torch on many elements would fetch
torch's other threads and wait for all of them, which on busy cores takes longer than the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from andon.transport.tcp.frames import Floats


def add(into: Floats, other: Floats) -> None:
    """Add in place. What overflows is found where all sums are looked at, and needs no warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(into, other, out=into)


def add_up(adds: Sequence[tuple[int, int]], leaves: Sequence[Floats]) -> None:
    """`Order.add_up` on arrays."""
    for into, other in adds:
        add(leaves[into], leaves[other])
