"""The trainer: one worker's part of a step. Every rank runs the same lines."""

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from andon.checkpoint.checkpointer import Checkpointer
from andon.data.batches import NO_TARGET, checksum
from andon.engine.membership import Membership
from andon.engine.optimizer import Optimizer, Totals
from andon.engine.recovery.commit import Settlement
from andon.integrity.halt import Finding, Flaw, JidokaHalt, find_flaw, share_findings

IntArray = npt.NDArray[np.int64]


def count_targets(targets: IntArray) -> int:
    """How many targets count; on the host, because a GPU would have to be waited for."""
    return int(np.count_nonzero(targets != NO_TARGET))


class BatchSource(Protocol):
    """Batches as a pure function of step and slot."""

    def __call__(self, step: int, slot: int) -> tuple[IntArray, IntArray]:
        """Inputs and targets."""
        ...

    def windows(self, step: int, slot: int) -> list[int]:
        """The numbers of the samples."""
        ...

    def name(self, window: int) -> int | str:
        """How a halt names a sample: the number of a window, or the line of a file."""
        ...


@dataclass(frozen=True)
class StepSettings:
    """What a step needs to know of the configuration."""

    learning_rate: Callable[[int], float]
    """Of a step, which counts from 1."""
    last_step: int
    clip: float = 0.0
    skips_allowed: int = 0
    """How many steps in a row may be skipped because a gradient was not finite; the next one halts."""
    autocast: torch.dtype | None = None


class SamplesOfStep:
    """A checksum of the samples of each slot; all ranks learn all of them with the step's exchange."""

    def __init__(self) -> None:
        self.mine: list[int] = []
        self.everyone: list[int] = []

    def status(self) -> list[int]:
        return self.mine

    def receive(self, statuses: Sequence[list[int]]) -> None:
        self.everyone = [each for of_rank in statuses for each in of_rank]


class Trainer:
    """Trains a model whose forward gives the loss of a batch, summed over its targets; or another `loss` of it."""

    def __init__(
        self,
        optimizer: Optimizer,
        batches: BatchSource,
        settings: StepSettings,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.optimizer, self.model, self.batches = optimizer, optimizer.model, batches
        self.settings, self.progress, self.checkpointer = settings, optimizer.progress, checkpointer
        self.stop = optimizer.stop
        self.loss: Callable[[Tensor, Tensor], Tensor] = self.model
        self.on_step: Callable[[Totals], None] = lambda totals: None
        self._samples = SamplesOfStep()
        optimizer.judge, optimizer.samples = self.judge, lambda: self._samples.everyone
        optimizer.passengers += [self.model.phases, self._samples]
        if checkpointer:
            optimizer.passengers.append(checkpointer)

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        assert self.checkpointer, "a trainer without a checkpointer cannot resume"
        self.checkpointer.load(folder)

    def train_step(self) -> Totals:
        """One step: slots, exchange, verdict, update, and a save where one is due."""
        step, model = self.progress.step + 1, self.model
        self._samples.mine = []
        for slot in model.slots:
            arrays = self.batches(step, slot)
            x, y = self.on_device(arrays)
            self._samples.mine.append(checksum(self.batches.windows(step, slot)))
            with model.phases("forward"), self.autocast():
                loss = self.loss(x, y)
            with model.phases("backward"):
                model.backward(loss, count_targets(arrays[1]), reduction="sum")
            del loss  # with its graph: the next slot's activations need the memory
        self.optimizer.lr = self.settings.learning_rate(step)
        totals = self.optimizer.step(self.settings.clip)
        self.on_step(totals)
        if self.checkpointer:
            with model.phases("save"):
                self.checkpointer.after(step, last=self.is_last)
        return totals

    def enter(self, membership: Membership, recorded: int) -> Settlement:
        """Go on in another generation; all its members call it together. See `Optimizer.enter`."""
        settled = self.optimizer.enter(membership, recorded)
        if self.checkpointer:
            self.checkpointer.enter()
        return settled

    def part(self) -> None:
        """Leave the generation, whatever has become of its group."""
        if self.checkpointer:
            self.checkpointer.close()
        self.model.part()

    @property
    def is_last(self) -> bool:
        """Whether no step follows the one that was done."""
        return self.stop.agreed or self.progress.step >= self.settings.last_step

    def judge(self, step: int, totals: Totals) -> bool:
        """Whether to update: not if the step is skipped; pulls the cord if it must not be (F-DP-003)."""
        if totals.sound:
            return True
        if self.progress.skips_in_a_row < self.settings.skips_allowed:
            return False
        raise JidokaHalt(step, totals.complaint, share_findings(self.model.group, self.findings(step, totals)))

    def findings(self, step: int, totals: Totals) -> list[Finding]:
        """Compute this rank's slots again, one by one, and look at every gradient."""
        layout, rank = self.model.arena.layout, self.model.membership.rank
        units = {unit for culprit, unit in totals.bad_units if culprit == rank}
        found = []
        for slot in self.model.membership.slots:
            self.model.seed_slot(slot)
            x, y = self.batch(step, slot)
            with self.autocast():
                loss = self.loss(x, y)
            flaws = [find_flaw("loss", loss.detach()), *self.model.gradients.inspect(loss, slot, find_flaw)]
            rows = self._bad_rows(x, y) if flaws[0] else list(range(len(x)))
            for flaw in filter(None, flaws):
                unit = layout.unit_of(flaw.parameter) if flaw.parameter != "loss" else "loss"
                units.discard(unit)
                found.append(self._finding(step, slot, unit, flaw, rows))
        passing = Flaw("", 0, 0, "a value that is not finite")
        return found + [self._finding(step, None, unit, passing) for unit in sorted(units)]

    def _bad_rows(self, x: Tensor, y: Tensor) -> list[int]:
        """The rows of a batch whose own loss is not finite; all of them, if each by itself is."""
        with torch.no_grad(), self.autocast():
            bad = [row for row in range(len(x)) if not torch.isfinite(self.loss(x[row : row + 1], y[row : row + 1]))]
        return bad or list(range(len(x)))

    def _finding(self, step: int, slot: int | None, unit: str, flaw: Flaw, rows: Sequence[int] = ()) -> Finding:
        windows = [] if slot is None else self.batches.windows(step, slot)
        samples = [self.batches.name(windows[row]) for row in rows]
        rank, host = self.model.membership.rank, socket.gethostname()
        return Finding(**asdict(flaw), rank=rank, host=host, slot=slot, samples=samples, unit=unit)

    def batch(self, step: int, slot: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a slot, on the device."""
        return self.on_device(self.batches(step, slot))

    def on_device(self, arrays: tuple[IntArray, IntArray]) -> tuple[Tensor, Tensor]:
        """A batch, where the model computes."""
        x, y = arrays
        device = self.model.arena.device
        return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the model computes."""
        if self.settings.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.arena.device.type, self.settings.autocast)

    def close(self) -> None:
        """Stop threads; the group stays open for whoever opened it."""
        if self.checkpointer:
            self.checkpointer.close()
        self.model.close()
