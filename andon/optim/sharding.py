"""ZeRO-1: who owns which part of the arena (C-ZERO-001).

Without it (`off`) every rank updates everything. With it a rank owns *parts*: a slice of every unit (`even`, with
bounds on cells) or whole units (`round_robin`, `contiguous`). Each rank receives the reduced gradients of its parts,
keeps their optimizer state and updates them; then the weights are gathered. The bits of a part do not depend on the
rank that computes them, so the answer is the same.

With `replicas` = 2 the next rank keeps and updates a copy of each rank's state, so the loss of one rank loses no state.
The cost: every rank needs the whole gradient, an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from andon.engine.gradients.arena import CELL, Layout
from andon.engine.gradients.order import shares
from andon.optim.base import Range
from andon.optim.shard_map import Policy, UnitOwners


@dataclass(frozen=True)
class Zero:
    """How the optimizer state is divided among the ranks."""

    policy: Policy = "even"
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy) or self.replicas not in (1, 2):
            known = ", ".join(get_args(Policy))
            raise ValueError(f"no such ZeRO: {self.policy!r} with {self.replicas} replicas; policies: {known}")


@dataclass(frozen=True)
class Ownership:
    """For each unit the bounds of the ranks' parts, counted from the unit's start; None: everyone owns it."""

    layout: Layout
    world_size: int
    bounds: tuple[tuple[int, ...], ...] | None
    replicas: int = 1

    @classmethod
    def of(cls, layout: Layout, world_size: int, zero: Zero) -> Ownership:
        """Apply a policy; a single rank has no other to keep a replica."""
        sizes = [unit.stop - unit.start for unit in layout.units]
        if zero.policy == "off":
            return cls(layout, world_size, None)
        if zero.policy == "even":
            bounds = [tuple(shares(size, world_size, CELL)) for size in sizes]
        else:
            owners = _unit_owners(layout, sizes, world_size, zero.policy)
            bounds = [_whole(size, owner, world_size) for size, owner in zip(sizes, owners, strict=True)]
        return cls(layout, world_size, tuple(bounds), min(zero.replicas, world_size))

    @property
    def sharded(self) -> bool:
        """Whether the ranks own different parts."""
        return self.bounds is not None

    def parts(self, rank: int) -> list[Range]:
        """The ranges of the arena that a rank updates, in order."""
        if self.bounds is None:
            return [(unit.start, unit.stop) for unit in self.layout.units]
        return [(lo, hi) for lo, hi in self.spans(rank) if lo < hi]

    def replica_parts(self, rank: int) -> list[Range]:
        """The ranges whose state a rank keeps for the rank before it."""
        return self.parts((rank - 1) % self.world_size) if self.replicas > 1 else []

    def spans(self, rank: int) -> list[Range]:
        """For each unit the range whose norm a rank computes: what it owns, or an even share."""
        units = self.layout.units
        bounds = self.bounds or [shares(unit.stop - unit.start, self.world_size, CELL) for unit in units]
        return [
            (unit.start + each[rank], unit.start + each[rank + 1]) for unit, each in zip(units, bounds, strict=True)
        ]


def _unit_owners(layout: Layout, sizes: Sequence[int], world_size: int, policy: Policy) -> list[int]:
    """The owner of each unit; blocks are counted from the first one, which is the last in the arena."""
    blocks = [index for index, unit in enumerate(layout.units) if unit.name.rpartition(".")[2].isdigit()]
    blocks.reverse()
    others = [index for index in range(len(sizes)) if index not in blocks]
    found = UnitOwners.of(policy, [sizes[i] for i in blocks], [sizes[i] for i in others], world_size)
    owners = dict(zip(blocks, found.blocks, strict=True)) | dict(zip(others, found.others, strict=True))
    return [owners[index] for index in range(len(sizes))]


def _whole(size: int, owner: int, world_size: int) -> tuple[int, ...]:
    return (0,) * (owner + 1) + (size,) * (world_size - owner)
