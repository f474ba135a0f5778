"""Arithmetic on one thread.

A transport works beside a computation that has the cores. An operation of torch on many elements would fetch
torch's other threads and wait for all of them, which on busy cores takes longer than the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from andon.group.wire import Floats


def add_up(adds: Sequence[tuple[int, int]], leaves: Sequence[Floats]) -> None:
    """`Order.add_up` on arrays."""
    for into, other in adds:
        np.add(leaves[into], leaves[other], out=leaves[into])
