"""The gather of updated weights (ZeRO): after an update a rank has new weights only where it owns them.

The other weights are gathered unit by unit, in the order in which forward needs them, on the thread of the exchange.
Reading weights through the arena waits until all are gathered. So does the module's forward, or with `overlap` each
unit's forward waits for its unit only, so that the gather continues while forward computes.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future

from torch import nn

from andon.engine.gradients.arena import Arena
from andon.engine.membership import Membership
from andon.optim.sharding import Ownership
from andon.transport.base import GroupError


class Gather:
    """Sends every owner's part of the weights to every rank."""

    def __init__(self, arena: Arena, membership: Membership, thread: Executor) -> None:
        self.arena, self._overlap = arena, False
        self.enter(membership, thread)
        arena.wait_for_weights = self.wait
        self.on_failure: Callable[[GroupError], None] = _raise
        """Called when forward waits for a gather that has failed."""

    def enter(self, membership: Membership, thread: Executor) -> None:
        """Gather over another group, and forget the gathers of the last one."""
        self.membership, self._thread = membership, thread
        self._newest: dict[int, Future[None]] = {}
        """The newest gather of each unit; several threads may wait for it."""
        self.failure: GroupError | None = None
        """Why the weights are not those after the last step: it was not committed, or they were not all gathered."""

    def hook(self, module: nn.Module, overlap: bool) -> None:
        """Make the module wait before its forward and its state dict; with `overlap` each unit's module waits for its
        unit, which requires that a unit's weights are used only by calling the unit's module."""
        self._overlap = overlap
        module.register_state_dict_pre_hook(lambda *_: self.wait())  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(lambda *_: self.wait())  # type: ignore[no-untyped-call]
        modules = dict(module.named_modules()) if overlap else {}
        names = Counter(value for _, value in module.named_parameters(remove_duplicate=False))
        parameters, first = self.arena.parameters, []
        for index, unit in enumerate(self.arena.layout.units):
            tied = any(names[parameters[piece.name]] > 1 for piece in unit.slices)
            if tied or unit.name not in modules:
                first.append(index)
            else:
                self._wait_before(modules[unit.name], [index])
        self._wait_before(module, first)

    def begin(self, ownership: Ownership) -> None:
        """Send the parts that their owners have updated to every rank."""
        before: Future[None] | None = None
        for index in reversed(range(len(ownership.bounds or ()))):
            if self._overlap:
                before = self._newest[index] = self._thread.submit(self._gather, ownership, index, before)
            else:
                self._gather(ownership, index)

    def wait(self) -> None:
        """Wait until all weights are gathered; raises the error of the step that failed."""
        self._wait(list(self._newest))

    def _wait(self, units: Iterable[int]) -> None:
        if self.failure:
            raise self.failure
        for index in units:
            if task := self._newest.get(index):
                task.result()

    def _wait_before(self, module: nn.Module, units: list[int]) -> None:
        def before_forward(*_: object) -> None:
            try:
                self._wait(units)
            except GroupError as failure:
                self.on_failure(failure)

        module.register_forward_pre_hook(before_forward)

    def _gather(self, ownership: Ownership, index: int, before: Future[None] | None = None) -> None:
        if before is not None:
            before.result()  # once a unit has failed, the rest fail with its error
        assert ownership.bounds is not None
        unit = self.arena.layout.units[index]
        self.membership.group.all_gather(self.arena.buffer[unit.start : unit.stop], ownership.bounds[index])


def _raise(failure: GroupError) -> None:
    raise failure
