"""Who owns which part of the optimizer state (C-ZERO-001): pure arithmetic, usable on its own.

`OptimizerShard` cuts a flat vector into contiguous shards whose sizes are within one of each other.
`ShardMap` gives whole units to ranks: blocks in turn (`round_robin`) or in runs (`contiguous`), and what is
not a block (LM head, final norm, embedding) to the rank that has least so far. Everything is complete,
disjoint, and counted in parameters. AdamW keeps two moments of four bytes for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from andon.engine.order import shares

MOMENT_BYTES = 2 * 4


@dataclass(frozen=True)
class OptimizerShard:
    """One rank's contiguous range [start, stop) of `total` parameters."""

    rank: int
    world_size: int
    start: int
    stop: int
    total: int

    @classmethod
    def for_rank(cls, rank: int, world_size: int, total: int) -> OptimizerShard:
        """The shard of a rank."""
        if not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank} among {world_size}")
        bounds = shares(total, world_size)
        return cls(rank, world_size, bounds[rank], bounds[rank + 1], total)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def memory_bytes(self) -> int:
        """What AdamW keeps for this shard."""
        return self.size * MOMENT_BYTES

    @property
    def full_memory_bytes(self) -> int:
        """What AdamW would keep without sharding."""
        return self.total * MOMENT_BYTES

    @property
    def savings(self) -> float:
        """The fraction of optimizer memory that this rank does not hold."""
        return 1.0 - self.size / self.total if self.total else 0.0

    def owns(self, parameter: int) -> bool:
        """Whether an index of the flat vector belongs to this shard."""
        return self.start <= parameter < self.stop


@dataclass(frozen=True)
class ShardMap:
    """The owner of each block and of each other unit, with their sizes in parameters."""

    world_size: int
    block_owners: tuple[int, ...]
    block_sizes: tuple[int, ...]
    other_owners: tuple[int, ...]
    other_sizes: tuple[int, ...]

    @classmethod
    def round_robin(cls, blocks: Sequence[int], others: Sequence[int], world_size: int) -> ShardMap:
        """Block i belongs to rank i modulo the world size; `blocks` and `others` are sizes."""
        return cls._complete([block % world_size for block in range(len(blocks))], blocks, others, world_size)

    @classmethod
    def contiguous(cls, blocks: Sequence[int], others: Sequence[int], world_size: int) -> ShardMap:
        """Blocks in runs: the first ranks get one more where they do not divide."""
        each, more = divmod(len(blocks), world_size)
        owners = [rank for rank in range(world_size) for _ in range(each + (rank < more))]
        return cls._complete(owners, blocks, others, world_size)

    @classmethod
    def _complete(
        cls, owners: Sequence[int], blocks: Sequence[int], others: Sequence[int], world_size: int
    ) -> ShardMap:
        load = [0] * world_size
        for owner, size in zip(owners, blocks, strict=True):
            load[owner] += size
        given = [0] * len(others)
        for index in sorted(range(len(others)), key=lambda index: -others[index]):
            given[index] = load.index(min(load))
            load[given[index]] += others[index]
        return cls(world_size, tuple(owners), tuple(blocks), tuple(given), tuple(others))

    def blocks_of(self, rank: int) -> list[int]:
        """The blocks that a rank owns."""
        return [block for block, owner in enumerate(self.block_owners) if owner == rank]

    def parameters_of(self, rank: int) -> int:
        """How many parameters a rank owns."""
        owned = zip(self.block_owners + self.other_owners, self.block_sizes + self.other_sizes, strict=True)
        return sum(size for owner, size in owned if owner == rank)

    def fraction_of(self, rank: int) -> float:
        """The fraction of the optimizer state that a rank holds, by parameters."""
        total = sum(self.block_sizes) + sum(self.other_sizes)
        return self.parameters_of(rank) / total if total else 0.0
