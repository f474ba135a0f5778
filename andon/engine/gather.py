"""The gather of updated weights (ZeRO), at once or beside the next forward.

After an update a rank has new weights only where it owns them. The rest comes unit by unit, in the order in
which forward needs it, on the thread that exchanges gradients: so nothing else is exchanged before it is
through. *Beside* the next forward, a module waits for its unit before it computes; whoever reads weights or
uses the group in another way must `settle` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Executor, Future

from torch import nn

from andon.engine.arena import Arena
from andon.optim.sharding import Ownership
from andon.transport.base import Group


class Gather:
    """Brings every rank's part of the weights to every rank."""

    def __init__(self, arena: Arena, group: Group, ownership: Ownership, thread: Executor) -> None:
        self.arena, self.group, self.ownership, self._thread = arena, group, ownership, thread
        self._on_the_way: dict[int, Future[None]] = {}
        self._beside = False

    def beside_forward(self, model: nn.Module) -> None:
        """From now on, go on beside the forward of a model that uses its units by calling their modules."""
        self._beside = True
        modules = dict(model.named_modules())
        names = Counter(value for _, value in model.named_parameters(remove_duplicate=False))
        at_once = []
        for index, unit in enumerate(self.arena.layout.units):
            tied = any(names[self.arena.parameters[piece.name]] > 1 for piece in unit.slices)
            if tied or unit.name not in modules:
                at_once.append(index)
            else:
                self._wait_before(modules[unit.name], [index])
        self._wait_before(model, at_once)

    def begin(self) -> None:
        """The weights have been updated: bring them to everyone."""
        before: Future[None] | None = None
        for index in reversed(range(len(self.ownership.bounds or ()))):
            before = self._on_the_way[index] = self._thread.submit(self._gather, index, before)
        if not self._beside:
            self.settle()

    def settle(self) -> None:
        """Wait until all weights are there; raises what went wrong on the way."""
        self._wait(list(self._on_the_way))

    def _wait(self, units: Iterable[int]) -> None:
        for index in units:
            if task := self._on_the_way.pop(index, None):
                task.result()

    def _wait_before(self, module: nn.Module, units: list[int]) -> None:
        module.register_forward_pre_hook(lambda *_: self._wait(units))

    def _gather(self, index: int, before: Future[None] | None) -> None:
        if before is not None:
            before.result()  # once a unit has failed, the rest fail with its error
        assert self.ownership.bounds is not None
        unit = self.arena.layout.units[index]
        self.group.all_gather(self.arena.weights[unit.start : unit.stop], self.ownership.bounds[index])
