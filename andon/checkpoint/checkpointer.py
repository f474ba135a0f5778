"""Checkpoints as the trainer sees them: `load` before the first step, `after` behind every step, and a status
that travels with every step's exchange. Everything else about saving lies behind these calls.
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
from andon.checkpoint.resume import load_checkpoint
from andon.checkpoint.saver import Saver, Tell
from andon.checkpoint.snapshot import Snapshot, saved_buffers
from andon.engine.optimizer import Optimizer
from andon.errors import UserError
from andon.integrity.halt import JidokaHalt
from andon.transport.base import GroupError

PATIENCE = 30.0  # seconds that training, or a halt, waits for a save before it goes on without


@dataclass(frozen=True)
class SaveSettings:
    """When to save, what to keep, and what a failure does."""

    every: int = 0
    """Steps between saves; 0: only the last step is saved."""
    keep: int = 3
    keep_every: int = 0
    on_failure: Literal["continue", "stop"] = "continue"
    timeout: float = 1800.0
    """Seconds after which a save is given up."""


@dataclass(frozen=True)
class RunFacts:
    """What a checkpoint says besides tensors and progress."""

    folder: Path
    """Where the checkpoints of the run lie."""
    state: Mapping[str, Any]
    """Fields of `state.json`: among them `config` and the digest of the `data`."""
    files: Mapping[str, str]
    """Text files by name, such as what Hugging Face needs."""
    holder: Callable[[], str] = lambda: ""
    """Which process holds the run's folder, as this rank sees it; empty: it does not see the folder."""
    check: Callable[[Path, Mapping[str, Any]], None] = lambda folder, state: None
    """Refuses a checkpoint, by its folder and its `state.json`, from which this run cannot go on."""
    progress: Callable[[], Mapping[str, Any]] = dict
    """Fields of `state.json` that change from step to step, besides those of `engine.progress`."""


class Checkpointer:
    """Saves and loads a run together with the other ranks."""

    def __init__(self, optimizer: Optimizer, facts: RunFacts, settings: SaveSettings, tell: Tell) -> None:
        self.optimizer, self.progress, self.facts, self.settings = optimizer, optimizer.progress, facts, settings
        self.tell, self.model = tell, optimizer.model
        self._overdue = -1
        """The step whose save has used up our patience."""
        self._saver = self._make_saver()

    def enter(self) -> None:
        """Save together with the members of another generation; a save that was on its way is given up."""
        saved = self._saver.saved
        self._saver.close()
        self._overdue, self._saver = -1, self._make_saver(saved)

    def _make_saver(self, saved: int = -1) -> Saver:
        """Each rank writes its own files; if some rank does not see the folder, rank 0 writes them all."""
        group, facts, settings = self.model.group, self.facts, self.settings
        told = group.all_gather_bytes(json.dumps([facts.holder(), saved]).encode())
        holders, everyone_saved = zip(*map(json.loads, told), strict=True)
        rank_0_writes_all = len(set(holders)) > 1
        self._moments = Moments(self.optimizer, rank_0_writes_all)
        holder = holders[group.rank]

        def may_write() -> None:
            if holder and facts.holder() not in (holder, ""):
                raise OSError(f"another run has taken {facts.folder.parent}")

        store = Store(facts.folder, settings.keep, settings.keep_every, may_write)
        if group.rank == 0:
            store.clean()
        pieces = {} if self._moments.gathers else self._moments.to_save()
        shards = 1 if rank_0_writes_all else group.world_size
        snapshot = Snapshot(self.model.arena, pieces, shards, weights=group.rank == 0)
        saver = Saver(self.model, store, snapshot, self.tell, settings.timeout)
        saver.saved = max(everyone_saved)
        return saver

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on from a verified checkpoint, exactly, with any number of workers; gives its `state.json`."""
        state = load_checkpoint(folder, self.optimizer, self.facts.check)
        self.progress.restore(state)
        self.optimizer.go_on_from(self.progress.step)
        if folder.resolve() == checkpoint_path(self.facts.folder, self.progress.step).resolve():
            self._saver.saved = self.progress.step
        return state

    @property
    def failure(self) -> UserError | None:
        """Why the last save failed, if it did."""
        return self._saver.failure

    def status(self) -> Any:
        """What this rank tells of a save in progress, with the step's exchange."""
        return self._saver.status()

    def receive(self, statuses: Sequence[Any]) -> None:
        """What all ranks told: the save moves on alike on every rank."""
        self._saver.receive(statuses)

    def after(self, step: int, last: bool = False) -> None:
        """A step is done: save it if it is due, in the background of the steps that follow; the last one now."""
        self._stop_if_configured()
        if should_save(step, self.settings.every, last):
            self.save(step, wait=last, patience=math.inf if last else PATIENCE)

    def after_halt(self, halt: JidokaHalt) -> None:
        """Keep the last committed step. The halt is what matters, so that a failure is only noted."""
        try:
            if halt.sound and self.progress.step:
                self.save(self.progress.step, wait=True, patience=PATIENCE)
            if not halt.sound:
                # Weights that differ may be in the snapshot of this step; an earlier step was compared since.
                self._saver.give_up(halt.step - 1, halt.cause)
                self._saver.finish(PATIENCE)
        except (UserError, GroupError) as error:
            self.tell("note", text=str(error))

    def close(self) -> None:
        """Give up what is still being written."""
        self._saver.close()

    def finish(self) -> None:
        """Wait with all ranks until no save is in progress."""
        self._saver.finish()

    def save(self, step: int, wait: bool = False, patience: float = math.inf) -> None:
        """Save the current step, in the background or now; for an earlier save it has `patience` seconds."""
        saver = self._saver
        if not saver.finish(patience if wait or saver.step != self._overdue else 0.0):
            self._overdue = saver.step
            text = f"Step {step} is not saved: the save of step {self._overdue} has not ended"
            self.tell("note", text=text)
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
                self.tell("note", text=f"The save of step {step} did not end in {patience:g} s")
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
            # Batches, first weights and what is drawn in a slot are pure functions of the seed.
            **self.facts.progress(),
            **self.facts.state,
        }
        return {"state.json": json.dumps(state, indent=2) + "\n", **self.facts.files}
