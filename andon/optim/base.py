"""Update rules: named state tensors over parts of the arena, and an update of the weights in those parts.

A *part* is a range [start, stop) of the arena. The state holds the parts one after another, so with ZeRO a rank keeps
state only for the parts that it owns. A new optimizer is a subclass of `UpdateRule`, named as `rule_type` by a subclass
of `engine.optimizer.Optimizer`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from andon.engine.gradients.arena import Arena

Range = tuple[int, int]


class UpdateRule(ABC):
    """Updates the weights of some parts of the arena from their summed gradients.

    It keeps state for `parts`, and updates the ranges `updated` of them (all, unless given)."""

    gated: ClassVar[bool] = False
    """Whether it has `update_unless`."""

    def __init__(self, arena: Arena, parts: Sequence[Range], updated: Sequence[Range] | None = None) -> None:
        self.arena, self.parts = arena, list(parts)
        self.updated = self.parts if updated is None else list(updated)
        self.size = sum(stop - start for start, stop in parts)
        self.state: dict[str, Tensor] = {}
        """Flat f32 tensors of `size` elements by name; checkpoints save and load them."""
        self.updates = 0
        """The number of updates so far; a skipped step does not count."""
        self.keeps_gradients = True
        """Whether `update` must leave the divided gradients behind; if not, nobody reads them."""

    @abstractmethod
    def update(self, gradients: Tensor, scale: float, options: Mapping[str, Any]) -> None:
        """Update the weights from summed gradients, which are divided by `scale`. `options` are those of the parameter
        group: `lr` and the optimizer's other options."""

    def update_unless(self, gate: Tensor, gradients: Tensor, scale: Tensor, options: Mapping[str, Any]) -> None:
        """`update` with numbers that only the device knows: if `gate` is true there, nothing changes, but `updates`
        still counts it."""
        raise NotImplementedError

    def weights_changed(self, parameters: Collection[str]) -> None:  # noqa: B027 (most rules keep no such state)
        """Bring state that is derived from the weights up to date: these parameters were set from outside."""

    def pieces(self, within: Sequence[Range] | None = None) -> Iterator[tuple[str, int, int, int]]:
        """(name, lo, hi, offset): the state of elements [lo, hi) of a parameter begins at `offset`.

        If `within` is given, only elements in these ranges of the arena."""
        offset = 0
        for start, stop in self.parts:
            for first, last in within if within is not None else [(start, stop)]:
                for piece in self.arena.layout.slices.values():
                    lo, hi = max(start, first, piece.start), min(stop, last, piece.stop)
                    if lo < hi:
                        yield piece.name, lo - piece.start, hi - piece.start, offset + lo - start
            offset += stop - start
