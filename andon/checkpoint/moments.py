"""The optimizer's state in a checkpoint: which rank saves which piece, and how each rank loads its part.

A piece is named `KIND.PARAMETER[lo:hi]`: elements lo to hi of a parameter, flattened. The pieces of all ranks
cover every parameter exactly once, so that any number of ranks can load them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from andon.engine.optimizer import Optimizer
from andon.optim.sharding import Ownership, Zero

ReadMoments = Callable[[str, str, int, int], Tensor]
"""(kind, parameter, lo, hi) → elements lo to hi."""


class Moments:
    """The state of an optimizer, as one rank saves and loads it."""

    def __init__(self, optimizer: Optimizer, rank_0_writes_all: bool) -> None:
        self.optimizer, self.model = optimizer, optimizer.model
        self.gathers = rank_0_writes_all and optimizer.ownership.sharded
        """Whether rank 0 must gather the other ranks' state before each save."""
        self._rank_0_writes_all = rank_0_writes_all
        self._gathered: dict[str, Tensor] = {}

    @property
    def sizes(self) -> dict[tuple[str, str], int]:
        """The number of elements of each (kind, parameter)."""
        parameters = self.model.arena.parameters
        return {(kind, name): parameters[name].numel() for kind in self.optimizer.rule.state for name in parameters}

    def to_save(self) -> dict[str, Tensor]:
        """The pieces that this rank saves, not copied; with `gathers` all ranks must call it together."""
        membership, rule = self.model.membership, self.optimizer.rule
        if self.gathers:
            return self._gather()
        if self._rank_0_writes_all and membership.rank:
            return {}
        ranges = self.optimizer.owned_parts
        if not self._rank_0_writes_all and not self.optimizer.ownership.sharded:
            # Every rank has the whole state: each saves an even share.
            even = Ownership.of(self.model.arena.layout, membership.world_size, Zero("even"))
            ranges = even.parts(membership.rank)
        pieces = list(rule.pieces(ranges))
        return {
            f"{kind}.{name}[{lo}:{hi}]": flat[at : at + hi - lo]
            for kind, flat in rule.state.items()
            for name, lo, hi, at in pieces
        }

    def _gather(self) -> dict[str, Tensor]:
        """Gather the whole state on the CPU of rank 0; the other ranks return nothing.

        They need memory for one unit only. Rank 0 keeps its buffers for the next save."""
        layout, group = self.model.arena.layout, self.model.group
        largest = max(unit.stop - unit.start for unit in layout.units)
        found: dict[str, Tensor] = {}
        for kind, flat in self.optimizer.rule.state.items():
            if group.rank == 0 and kind not in self._gathered:
                self._gathered[kind] = torch.zeros(layout.size)
            buffer, at = self._gathered[kind] if group.rank == 0 else torch.zeros(largest), 0
            for unit, bounds in zip(layout.units, self.optimizer.ownership.bounds or (), strict=True):
                start = unit.start if group.rank == 0 else 0
                whole = buffer[start : start + unit.stop - unit.start]
                lo, hi = bounds[group.rank : group.rank + 2]
                whole[lo:hi].copy_(flat[at : at + hi - lo])
                at += hi - lo
                group.all_gather(whole, bounds)
            if group.rank == 0:
                views = layout.views(buffer).items()
                found |= {f"{kind}.{name}[0:{view.numel()}]": view.view(-1) for name, view in views}
        return found

    def load(self, read: ReadMoments) -> None:
        """Read this rank's part."""
        for kind, flat in self.optimizer.rule.state.items():
            for name, lo, hi, at in self.optimizer.rule.pieces():
                flat[at : at + hi - lo].copy_(read(kind, name, lo, hi))

    def receive(self, read: ReadMoments | None) -> None:
        """Receive this rank's part from rank 0, the only rank that can read the checkpoint."""
        arena, group = self.model.arena, self.model.group
        for kind, flat in self.optimizer.rule.state.items():
            for unit in arena.layout.units:
                whole = arena.zeros(unit.stop - unit.start)
                if read:
                    for piece in unit.slices:
                        lo, size = piece.start - unit.start, piece.shape.numel()
                        whole[lo : lo + size].copy_(read(kind, piece.name, 0, size))
                group.broadcast(whole, src=0)
                for name, lo, hi, at in self.optimizer.rule.pieces([(unit.start, unit.stop)]):
                    start = arena.layout.slices[name].start - unit.start
                    flat[at : at + hi - lo].copy_(whole[start + lo : start + hi])
