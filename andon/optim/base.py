"""What an optimizer is here: named state tensors over parts of the arena, and an update on those parts.

A *part* is a range [start, stop) of the arena. The state holds the parts one after another, so with ZeRO a
rank keeps state only for the parts that it owns. A new optimizer is one file with a subclass of `UpdateRule`, which
`engine.optimizer.Optimizer` takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from andon.engine.gradients.arena import Arena

Range = tuple[int, int]


class UpdateRule(ABC):
    """Updates the weights of some parts of the arena from their summed gradients.

    It keeps state for `parts`, and updates those of them that lie in `updated` (all, unless given)."""

    gated: ClassVar[bool] = False
    """Whether it has `update_unless`."""

    def __init__(self, arena: Arena, parts: Sequence[Range], updated: Sequence[Range] | None = None) -> None:
        self.arena, self.parts = arena, list(parts)
        self.updated = self.parts if updated is None else list(updated)
        self.size = sum(stop - start for start, stop in parts)
        self.state: dict[str, Tensor] = {}
        """Flat f32 tensors of `size` elements by name; checkpoints save and load them."""
        self.updates = 0
        """How many updates were made; a skipped step is none."""
        self.keeps_gradients = True
        """Whether `update` leaves the divided gradients behind. If not, it may: they are not read again."""

    @abstractmethod
    def update(self, gradients: Tensor, scale: float, options: Mapping[str, Any]) -> None:
        """Update the weights from summed gradients, which are divided by `scale`. `options` are those of the parameter
        group: `lr`, and whatever the optimizer was made with."""

    def update_unless(self, gate: Tensor, gradients: Tensor, scale: Tensor, options: Mapping[str, Any]) -> None:
        """`update` with numbers that only the device knows: if `gate` is true there, nothing changes, although
        `updates` counts it."""
        raise NotImplementedError

    def weights_changed(self, parameters: Collection[str]) -> None:  # noqa: B027 (most rules keep no such state)
        """Somebody has set these weights; state that follows from them has to follow."""

    def pieces(self, within: Sequence[Range] | None = None) -> Iterator[tuple[str, int, int, int]]:
        """(name, lo, hi, offset): the state of elements [lo, hi) of a parameter begins at `offset`.

        Only what lies in the ranges `within` of the arena, if given."""
        offset = 0
        for start, stop in self.parts:
            for first, last in within if within is not None else [(start, stop)]:
                for piece in self.arena.layout.slices.values():
                    lo, hi = max(start, first, piece.start), min(stop, last, piece.stop)
                    if lo < hi:
                        yield piece.name, lo - piece.start, hi - piece.start, offset + lo - start
            offset += stop - start
