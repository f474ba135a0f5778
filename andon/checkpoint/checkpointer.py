"""Checkpoints as the trainer sees them: `load` before the first step, `after` after every step, and a status
that travels with every step's exchange.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from andon.checkpoint.disk.listing import checkpoint_path, should_save
from andon.checkpoint.disk.store import Store
from andon.checkpoint.moments import Moments
from andon.checkpoint.resume import Check, load_checkpoint
from andon.checkpoint.saver import Report, Saver
from andon.checkpoint.snapshot import Snapshot, saved_buffers
from andon.engine.optimizer import Optimizer
from andon.errors import UserError
from andon.integrity.halt import JidokaHalt
from andon.transport.base import GroupError

PATIENCE_SECONDS = 30.0  # that training, or a halt, waits for a save before it continues without it


@dataclass(frozen=True)
class SaveSettings:
    """When to save, which checkpoints to keep, and whether a failed save ends the run."""

    every: int = 0
    """Steps between saves; 0: only the last step is saved."""
    keep: int = 3
    keep_every: int = 0
    on_failure: Literal["continue", "stop"] = "continue"
    timeout: float = 1800.0
    """Seconds after which a save is given up."""


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint holds besides tensors and progress."""

    folder: Path
    """The folder of the run's checkpoints."""
    state: Mapping[str, Any]
    """Fields of `state.json`: among them `config` and the digest of the `data`."""
    files: Mapping[str, str]
    """Text files by name, such as those that Hugging Face needs."""
    folder_mark: Callable[[], str] = lambda: ""
    """The mark of the process that has locked the run's folder; empty if this rank does not see the folder."""
    check: Check = lambda folder, state: None
    progress: Callable[[], Mapping[str, Any]] = dict
    """Fields of `state.json` that change from step to step, in addition to those of `engine.progress`."""


class Checkpointer:
    """Saves and loads a run together with the other ranks."""

    def __init__(self, optimizer: Optimizer, facts: RunFacts, settings: SaveSettings, report: Report) -> None:
        self.optimizer, self.progress, self.facts, self.settings = optimizer, optimizer.progress, facts, settings
        self.report, self.model = report, optimizer.model
        self.asked = -1
        """The step for which a save was asked last."""
        self._overdue = -1
        """The step whose save has taken longer than `save` waits for it."""
        self._saver = self._make_saver()

    def enter(self) -> None:
        """Save together with the members of another generation; a save in progress is given up (see `after_change`)."""
        saved = self._saver.saved
        self._saver.close()
        self._overdue, self._saver = -1, self._make_saver(saved)

    def _make_saver(self, saved: int = -1) -> Saver:
        """Each rank writes its own files; if some rank does not see the folder, rank 0 writes them all."""
        group, facts, settings = self.model.group, self.facts, self.settings
        of_ranks = group.all_gather_json([facts.folder_mark(), saved, self.asked])
        marks, everyone_saved, everyone_asked = zip(*of_ranks, strict=True)
        self.asked = max(everyone_asked)
        rank_0_writes_all = len(set(marks)) > 1
        self._moments = Moments(self.optimizer, rank_0_writes_all)
        mark = marks[group.rank]

        def may_write() -> None:
            if mark and facts.folder_mark() not in (mark, ""):
                raise OSError(f"another run has taken {facts.folder.parent}")

        store = Store(facts.folder, settings.keep, settings.keep_every, may_write)
        if group.rank == 0:
            store.clean()
        pieces = {} if self._moments.gathers else self._moments.to_save()
        shards = 1 if rank_0_writes_all else group.world_size
        snapshot = Snapshot(self.model.arena, pieces, shards, weights=group.rank == 0)
        saver = Saver(self.model, store, snapshot, self.report, settings.timeout)
        saver.saved = max(everyone_saved)
        return saver

    def load(self, folder: Path) -> dict[str, Any]:
        """Resume exactly from a verified checkpoint, with any number of workers; returns its `state.json`."""
        state = load_checkpoint(folder, self.optimizer, self.facts.check)
        self.progress.restore(state)
        self.optimizer.go_on_from(self.progress.step)
        own = folder.resolve() == checkpoint_path(self.facts.folder, self.progress.step).resolve()
        # What is saved must be the same on every rank: a worker elsewhere has received a copy in a folder of its own.
        self._saver.saved = self.progress.step if self.model.group.all_gather_json(own)[0] else -1
        return state

    def go_back_to_first(self) -> None:
        """All ranks go back to the first weights, without a checkpoint: every step is saved anew."""
        self.asked = self._saver.saved = -1

    @property
    def failure(self) -> UserError | None:
        """Why the last save failed, if it did."""
        return self._saver.failure

    def status(self) -> Any:
        """This rank's status of the save, which the step's exchange carries."""
        return self._saver.status()

    def receive(self, statuses: Sequence[Any]) -> None:
        """Take the statuses of all ranks: the save advances in the same way on every rank."""
        self._saver.receive(statuses)

    def after(self, step: int, last: bool = False) -> None:
        """Save a step if it is due: in the background of the steps that follow, or at once if it is the last."""
        self._stop_if_configured()
        if should_save(step, self.settings.every, last):
            self.save(step, wait=last, patience=math.inf if last else PATIENCE_SECONDS)

    def after_change(self) -> None:
        """In a new generation: save now if a save was interrupted or is due; all ranks call it together."""
        step = self.progress.step
        if self._saver.saved < self.asked <= step or should_save(step, self.settings.every, last=False):
            self.save(step)

    def save_if_skipped(self) -> None:
        """Save the current step if it was asked for, but an earlier save had not ended then."""
        if not self._saver.failure and self._saver.saved < self.asked == self.progress.step:
            self.save(self.asked, wait=True)

    def after_halt(self, halt: JidokaHalt) -> None:
        """Save the last committed step; if that fails it is only noted, because the halt matters more."""
        try:
            if halt.sound and self.progress.step:
                self.save(self.progress.step, wait=True, patience=PATIENCE_SECONDS)
            if not halt.sound:
                # The snapshot of this step may hold weights that differ; earlier steps were compared since.
                self._saver.give_up(halt.step - 1, halt.cause)
                self._saver.finish(PATIENCE_SECONDS)
        except (UserError, GroupError) as error:
            self.report("note", text=str(error))

    def close(self) -> None:
        """Give up a save in progress."""
        self._saver.close()

    def finish(self) -> None:
        """Wait with all ranks until no save is in progress."""
        self._saver.finish()

    def save(self, step: int, wait: bool = False, patience: float = math.inf) -> None:
        """Save the current step, in the background or now; it waits `patience` seconds for an earlier save."""
        saver, self.asked = self._saver, step
        if not saver.finish(patience if wait or saver.step != self._overdue else 0.0):
            self._overdue = saver.step
            self.report("note", text=f"Step {step} is not saved: the save of step {saver.step} has not ended")
            return
        self._stop_if_configured()
        if saver.saved == step:
            return
        if self._moments.gathers:
            saver.snapshot.moments = self._moments.to_save()
        if self.model.membership.rank == 0:
            saver.snapshot.keep_buffers(saved_buffers(self.model.module))
        saver.request(step, self._texts() if self.model.membership.rank == 0 else {})
        if wait:
            if not saver.finish(patience):
                self.report("note", text=f"The save of step {step} did not end in {patience:g} s")
            if saver.failure:
                raise saver.failure

    def _stop_if_configured(self) -> None:
        if self._saver.failure and self.settings.on_failure == "stop":
            raise self._saver.failure

    def _texts(self) -> dict[str, str]:
        """The files of a checkpoint besides its tensors."""
        state = {
            **self.progress.fields(),
            "learning_rate": self.optimizer.lr,
            "next": {"step": self.progress.step + 1, "slot": 0},
            "slots": self.model.membership.order.slots,
            "world_size": self.model.membership.world_size,
            # No generator state: batches, first weights and a slot's random numbers are pure functions of the seed.
            **self.facts.progress(),
            **self.facts.state,
        }
        return {"state.json": json.dumps(state, indent=2) + "\n", **self.facts.files}
