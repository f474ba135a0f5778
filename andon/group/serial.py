"""Arithmetic on one thread.

A transport works beside a computation that has the cores. An operation of torch on more than GRAIN elements
would fetch torch's other threads and wait for all of them, which on busy cores takes longer than the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from andon.group.wire import Floats

GRAIN: Final = 32_000


def add_up(adds: Sequence[tuple[int, int]], leaves: Sequence[Floats]) -> None:
    """`Order.add_up` on arrays."""
    for into, other in adds:
        np.add(leaves[into], leaves[other], out=leaves[into])


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, converting between types."""
    if torch.get_num_threads() == 1:
        target.copy_(source)
        return
    for part in _grains(target):
        target[part].copy_(source[part])


def add(target: torch.Tensor, other: torch.Tensor) -> None:
    """Add in place."""
    if torch.get_num_threads() == 1:
        target.add_(other)
        return
    for part in _grains(target):
        target[part].add_(other[part])


def _grains(tensor: torch.Tensor) -> list[slice]:
    return [slice(at, at + GRAIN) for at in range(0, len(tensor), GRAIN)]
