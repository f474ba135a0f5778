"""Which rank's gradient was not finite (F-DP-003).

A value that is not finite anywhere makes the global norm not finite, which every rank sees. The rank that computed it
is found in one of two ways. If the reduce preserves its inputs, the ranks check their contributions afterwards, and
only if the norm is bad (`blame_after_reduce`). If the reduce overwrites them, each rank checks its contribution before:
it sums every gradient right after backward, while the cache holds it (`GradientSums`), and checks a unit element by
element if one of its sums is not finite.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from andon.engine.gradients.arena import Arena, Unit
from andon.optim.sharding import Ownership
from andon.transport.base import Group

SAFE_MAX = 1e37
"""Smaller values can be summed over a few ranks and slots without an overflow."""


class GradientSums:
    """The sum of each gradient in each slot of a step; a value that is not finite makes the sum not finite."""

    def __init__(self, arena: Arena, slots: range) -> None:
        self._first_slot = slots.start
        # One tensor for all: many small tensors among large temporary ones would fragment the allocator.
        self._sums = arena.zeros(len(slots) * len(arena.parameters)).view(len(slots), -1)
        self._column = {name: column for column, name in enumerate(arena.layout.slices)}

    def reset(self) -> None:
        """Begin a step."""
        self._sums.zero_()

    def note(self, slot: int, name: str, gradient: Tensor) -> None:
        """Keep the sum of a parameter's gradient."""
        torch.sum(gradient.view(-1), 0, out=self._sums[slot - self._first_slot, self._column[name]])

    def are_finite(self, unit: Unit) -> bool:
        """Whether all sums of a unit are finite."""
        first = self._column[unit.slices[0].name]
        return bool(torch.isfinite(self._sums[:, first : first + len(unit.slices)]).all())


def is_finite(values: Tensor) -> bool:
    """Whether every value is finite, and so small that the sum over the ranks is finite, too."""
    return not values.numel() or bool(values.abs().amax() < SAFE_MAX)


def blame_after_reduce(group: Group, ownership: Ownership, rows: Tensor, total: Tensor) -> list[tuple[int, str]]:
    """(rank, unit) of every contribution that was not finite, from rows that the reduce has preserved.

    The reduce has overwritten one thing: the owner's part of its own first row now holds the sum. If that sum is
    bad and no other contribution to the part is, the owner's contribution was bad."""
    rank, units = group.rank, ownership.layout.units
    bad: list[tuple[int, int]] = []
    bad_sums: list[int] = []
    for owner in range(group.world_size):
        for unit, (lo, hi) in enumerate(ownership.spans(owner)):
            if not is_finite(rows[1 if owner == rank else 0 :, lo:hi]):
                bad.append((unit, owner))
            if owner == rank and not is_finite(total[lo:hi]):
                bad_sums.append(unit)
    reports = group.all_gather_json([bad, bad_sums])
    blamed = _blame([({(unit, owner) for unit, owner in found}, sums) for found, sums in reports])
    return [(culprit, units[unit].name) for culprit, unit in sorted(blamed)]


def _blame(reports: Sequence[tuple[set[tuple[int, int]], list[int]]]) -> set[tuple[int, int]]:
    """(rank, unit) from each rank's report: its bad contributions as (unit, owner), and its bad sums."""
    blamed = {(rank, unit) for rank, (bad, _) in enumerate(reports) for unit, _ in bad}
    explained = {part for bad, _ in reports for part in bad}
    for owner, (_, bad_sums) in enumerate(reports):
        blamed |= {(owner, unit) for unit in bad_sums if (unit, owner) not in explained}
    return blamed
