"""ZeRO-1: who updates which part of the arena (C-ZERO-001).

Without it (`off`) every rank updates everything. With it a rank owns *parts* of units: a slice of every unit
(`even`, boundaries on cells) or whole units (`round_robin`, `contiguous`). Gradients are then reduced to
their owners only, each rank keeps AdamW's moments for what it owns, updates it, and the weights are gathered.
A part's bits do not depend on who computes them, so the answer is the same.

With `replicas` = 2 the next rank keeps a copy of each rank's moments and updates it alike, so that the loss
of one rank loses nothing; then every rank needs the whole gradient, which costs an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from andon.engine.arena import CELL, Layout
from andon.engine.order import shares
from andon.optim.shard_map import ShardMap

Policy = Literal["off", "even", "round_robin", "contiguous"]
Range = tuple[int, int]


@dataclass(frozen=True)
class Zero:
    """How the optimizer state is shared out."""

    policy: Policy = "off"
    replicas: int = 1


@dataclass(frozen=True)
class Ownership:
    """For each unit the bounds of the ranks' parts, counted from the unit's start; None: everyone owns it."""

    layout: Layout
    world_size: int
    bounds: tuple[tuple[int, ...], ...] | None
    replicas: int = 1

    @classmethod
    def of(cls, layout: Layout, world_size: int, policy: Policy, replicas: int = 1) -> Ownership:
        """The ownership that a policy gives; alone there is nobody to keep a replica."""
        replicas = min(replicas, world_size)
        sizes = [unit.stop - unit.start for unit in layout.units]
        if policy == "off":
            return cls(layout, world_size, None)
        if policy == "even":
            even = tuple(tuple(shares(size, world_size, CELL)) for size in sizes)
            return cls(layout, world_size, even, replicas)
        owners = _unit_owners(layout, sizes, world_size, policy)
        bounds = [_whole(size, owner, world_size) for size, owner in zip(sizes, owners, strict=True)]
        return cls(layout, world_size, tuple(bounds), replicas)

    @property
    def shared(self) -> bool:
        """Whether the state is shared out at all."""
        return self.bounds is not None

    def parts(self, rank: int) -> list[Range]:
        """The ranges of the arena that a rank updates, in order."""
        if self.bounds is None:
            return [(unit.start, unit.stop) for unit in self.layout.units]
        return [(lo, hi) for lo, hi in self.spans(rank) if lo < hi]

    def replica_parts(self, rank: int) -> list[Range]:
        """The ranges whose moments a rank keeps for the rank before it."""
        return self.parts((rank - 1) % self.world_size) if self.replicas > 1 else []

    def spans(self, rank: int) -> list[Range]:
        """For each unit the range whose norm a rank computes: what it owns, or an even share."""
        units = self.layout.units
        bounds = self.bounds or [shares(unit.stop - unit.start, self.world_size, CELL) for unit in units]
        return [
            (unit.start + each[rank], unit.start + each[rank + 1])
            for unit, each in zip(units, bounds, strict=True)
        ]


def _unit_owners(layout: Layout, sizes: Sequence[int], world_size: int, policy: Policy) -> list[int]:
    """Blocks by the map, counted from the first one; the other units to the least loaded rank."""
    blocks = [index for index, unit in enumerate(layout.units) if unit.name.rpartition(".")[2].isdigit()][
        ::-1
    ]
    others = [index for index in range(len(sizes)) if index not in blocks]
    make = ShardMap.round_robin if policy == "round_robin" else ShardMap.contiguous
    found = make([sizes[index] for index in blocks], [sizes[index] for index in others], world_size)
    owners = dict(zip(blocks, found.block_owners, strict=True)) | dict(
        zip(others, found.other_owners, strict=True)
    )
    return [owners[index] for index in range(len(sizes))]


def _whole(size: int, owner: int, world_size: int) -> tuple[int, ...]:
    return (0,) * (owner + 1) + (size,) * (world_size - owner)
