"""The trainer: the step of a run, as every rank runs it, and what it finds when a step is not sound."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from andon.checkpoint.checkpointer import Checkpointer
from andon.data.batches import checksum
from andon.engine.loader import BatchSource, Loader
from andon.engine.membership import Membership
from andon.engine.optimizer import Optimizer
from andon.engine.recovery.commit import Recovery
from andon.engine.verdict import Totals
from andon.integrity.halt import Finding, Flaw, JidokaHalt, find_flaw, share_findings


@dataclass(frozen=True)
class StepSettings:
    """The part of the configuration that a step uses."""

    learning_rate: Callable[[int], float]
    """By step; the first step is 1."""
    last_step: int
    clip: float = 0.0
    skips_allowed: int = 0
    """How many steps in a row may be skipped because a gradient is not finite; the next one halts."""


class SamplesOfStep:
    """A checksum of the samples of each slot; a passenger of the step's exchange."""

    def __init__(self) -> None:
        self.mine: list[int] = []
        self.everyone: list[int] = []

    def status(self) -> list[int]:
        return self.mine

    def receive(self, statuses: Sequence[list[int]]) -> None:
        self.everyone = [each for of_rank in statuses for each in of_rank]


class Trainer:
    """Trains a model whose forward gives the loss of a batch, summed over its targets, unless `loss` is replaced."""

    def __init__(
        self,
        optimizer: Optimizer,
        batches: BatchSource,
        settings: StepSettings,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.optimizer, self.model, self.batches = optimizer, optimizer.model, batches
        self.settings, self.progress, self.checkpointer = settings, optimizer.progress, checkpointer
        self.batch = Loader(batches, self.model.arena.device)
        """(step, slot) → the batch, on the device."""
        self.loss: Callable[[Tensor, Tensor], Tensor] = self.model
        self.on_step: Callable[[Totals], None] = lambda totals: None
        self._samples = SamplesOfStep()
        optimizer.judge, optimizer.samples = self.judge, lambda: self._samples.everyone
        optimizer.passengers += [self.model.phases, self._samples]
        optimizer.rule.keeps_gradients = False
        if checkpointer:
            optimizer.passengers.append(checkpointer)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint."""
        assert self.checkpointer, "a trainer without a checkpointer cannot resume"
        self.checkpointer.load(folder)

    def train_step(self) -> Totals:
        """One step: slots, exchange, verdict, update, and a save where one is due."""
        step, model = self.progress.step + 1, self.model
        self._samples.mine = []
        for slot in model.slots:
            x, y, count = self.batch(step, slot)
            self._samples.mine.append(checksum(self.batches.windows(step, slot)))
            with model.phases("forward"):
                loss = self.loss(x, y)
            self._prepare_next_batch(step, slot)
            with model.phases("backward"):
                model.backward(loss, count, reduction="sum")
            del loss  # frees its graph: the next slot's activations need the memory
        self.optimizer.lr = self.settings.learning_rate(step)
        totals = self.optimizer.step(self.settings.clip)
        self.on_step(totals)
        if self.checkpointer:
            with model.phases("save"):
                self.checkpointer.after(step, last=self.is_last)
        return totals

    def _prepare_next_batch(self, step: int, slot: int) -> None:
        slots = self.model.membership.slots
        if slot < slots[-1]:
            self.batch.prepare(step, slot + 1)
        elif step < self.settings.last_step:
            self.batch.prepare(step + 1, slots[0])

    def enter(self, membership: Membership, recorded: int) -> Recovery:
        """Enter another generation; all its members call it together. See `Optimizer.enter`."""
        recovery = self.optimizer.enter(membership, recorded)
        if self.checkpointer:
            self.checkpointer.enter()
        return recovery

    def part(self) -> None:
        """Leave the generation; its group may have failed."""
        if self.checkpointer:
            self.checkpointer.close()
        self.model.part()

    @property
    def is_last(self) -> bool:
        """Whether the step that was just done is the last one."""
        return self.optimizer.stop.agreed or self.progress.step >= self.settings.last_step

    def judge(self, step: int, totals: Totals) -> bool:
        """Whether to update; a step that is not sound is skipped, or halts if too many in a row were (F-DP-003)."""
        if totals.sound:
            return True
        if self.progress.skips_in_a_row < self.settings.skips_allowed:
            return False
        raise JidokaHalt(step, totals.complaint, *share_findings(self.model.group, self.findings(step, totals)))

    def findings(self, step: int, totals: Totals) -> list[Finding]:
        """Compute this rank's slots again, one by one, and inspect every gradient."""
        layout, rank = self.model.arena.layout, self.model.membership.rank
        units = {unit for culprit, unit in totals.bad_units if culprit == rank}
        found = []
        for slot in self.model.membership.slots:
            self.model.begin_again(slot)
            x, y, _ = self.batch(step, slot)
            loss = self.loss(x, y)
            flaws = [find_flaw("loss", loss.detach()), *self.model.gradients.inspect(loss, slot, find_flaw)]
            rows = self._bad_rows(x, y) if flaws[0] else list(range(len(x)))
            for flaw in filter(None, flaws):
                unit = layout.unit_of(flaw.parameter) if flaw.parameter != "loss" else "loss"
                units.discard(unit)
                found.append(self._finding(step, slot, unit, flaw, rows))
        self.model.buffers_of_step.restore()
        not_seen_again = Flaw("", 0, 0, "a value that is not finite")
        return found + [self._finding(step, None, unit, not_seen_again) for unit in sorted(units)]

    def _bad_rows(self, x: Tensor, y: Tensor) -> list[int]:
        """The rows of a batch whose loss is not finite; all rows if each loss by itself is finite."""
        with torch.no_grad():
            bad = [row for row in range(len(x)) if not torch.isfinite(self.loss(x[row : row + 1], y[row : row + 1]))]
        return bad or list(range(len(x)))

    def _finding(self, step: int, slot: int | None, unit: str, flaw: Flaw, rows: Sequence[int] = ()) -> Finding:
        windows = [] if slot is None else self.batches.windows(step, slot)
        samples = [self.batches.name(windows[row]) for row in rows]
        rank, host = self.model.membership.rank, socket.gethostname()
        return Finding(**asdict(flaw), rank=rank, host=host, slot=slot, samples=samples, unit=unit)

    def close(self) -> None:
        """Stop threads; the caller closes the group."""
        if self.checkpointer:
            self.checkpointer.close()
        self.batch.close()
        self.model.close()
