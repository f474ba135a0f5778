"""Which rank owns which whole unit (C-ZERO-001): pure arithmetic without torch, so that a plan can use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Policy = Literal["off", "even", "round_robin", "contiguous"]


@dataclass(frozen=True)
class UnitOwners:
    """The owner of each block and of each other unit. Blocks are dealt in turn or in runs; each other unit (LM head,
    final norm, embedding) goes to the rank that owns the fewest parameters so far."""

    blocks: tuple[int, ...]
    others: tuple[int, ...]
    parameters: tuple[int, ...]
    """The number of parameters that each rank owns."""

    @classmethod
    def of(cls, policy: Policy, blocks: Sequence[int], others: Sequence[int], world_size: int) -> UnitOwners:
        """Owners under `round_robin` or `contiguous`; `blocks` and `others` are sizes in parameters."""
        if policy == "round_robin":
            owners = [block % world_size for block in range(len(blocks))]
        else:  # the first ranks get one block more if the blocks do not divide evenly
            each, more = divmod(len(blocks), world_size)
            owners = [rank for rank in range(world_size) for _ in range(each + (rank < more))]
        load = [0] * world_size
        for owner, size in zip(owners, blocks, strict=True):
            load[owner] += size
        given = [0] * len(others)
        for index in sorted(range(len(others)), key=lambda index: -others[index]):
            given[index] = load.index(min(load))
            load[given[index]] += others[index]
        return cls(tuple(owners), tuple(given), tuple(load))
