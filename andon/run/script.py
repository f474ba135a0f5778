"""`andon.save` and `andon.load`: the checkpoints of a script, as verified and asynchronous as those of `andon train`.

A script's checkpoints are in FOLDER/checkpoints, and FOLDER is locked while the script runs. `checkpoint-N` holds the
state after N steps. The first of the two calls prepares the folder together with all ranks. A save runs during the
steps that follow it, and `group.close` waits for the last one.
"""

import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from andon.checkpoint.checkpointer import PATIENCE_SECONDS, Checkpointer, RunFacts, SaveSettings
from andon.checkpoint.disk.format import DTYPES
from andon.checkpoint.disk.store import weights_blake3
from andon.checkpoint.snapshot import saved_buffers
from andon.engine.optimizer import Optimizer
from andon.engine.parallel import DataParallel
from andon.errors import EXIT_STOPPED, UserError, harmless
from andon.files import expand
from andon.integrity.probe import differing, take_probe
from andon.run.loop import find_on_rank_0
from andon.run.records.folder import RunFolder, read_mark
from andon.run.records.typed_json import from_json, to_json
from andon.run.resumable import other_bits
from andon.transport.base import GroupError
from andon.transport.changing import ChangingGroup

LOCK_SECONDS = 10.0  # time for the process of a lost rank 0 to end, which has locked the folder


def load(
    folder: str | Path, model: DataParallel, optimizer: Optimizer, scheduler: LRScheduler | None = None, keep: int = 3
) -> int:
    """Resume from the newest good checkpoint; returns the number of the next step, which is 0 without a checkpoint.

    All ranks call it together, with any number of workers. It also sets the folder and the scheduler that are saved
    when the run is stopped. The `keep` newest checkpoints are kept."""
    checkpoints = _checkpoints(folder, model, optimizer, scheduler, keep)
    if not checkpoints.is_open:
        return optimizer.progress.step
    if optimizer.failure:  # a worker was lost: the step is repeated, unless it was committed
        optimizer.is_new |= not checkpoints.repeats_step
        model.gather.failure = optimizer.failure
        return optimizer.progress.step
    try:
        is_loaded, group = checkpoints.load(), model.membership.group
    except GroupError as failure:
        if not optimizer.goes_on:
            raise
        optimizer.failure = model.gather.failure = failure
        optimizer.is_new = True  # a part of the state may be that of the checkpoint
        return optimizer.progress.step
    step = optimizer.progress.step
    if is_loaded and isinstance(group, ChangingGroup):
        group.report(optimizer.commit.records_of(group.reported + 1, step))
        group.went_back(group.generation, step)
        group.reported = step
    return step


def save(
    folder: str | Path,
    model: DataParallel,
    optimizer: Optimizer,
    step: int,
    scheduler: LRScheduler | None = None,
    keep: int = 3,
) -> None:
    """Save after a step, counted from 0, in the background of the steps after it. All ranks call it together."""
    checkpoints = _checkpoints(folder, model, optimizer, scheduler, keep)
    if checkpoints.is_open:  # a worker that joins has nothing to save before the loop
        checkpoints.save(step)


def digest(module: nn.Module) -> str:
    """BLAKE3 over a module's state: in the order of names, each name and its bytes."""
    return weights_blake3(module.state_dict())


class ScriptCheckpoints:
    """The checkpoints of one optimizer of a script."""

    checkpointer: Checkpointer

    def __init__(self, folder: Path, optimizer: Optimizer, scheduler: LRScheduler | None, keep: int) -> None:
        self.folder, self.optimizer, self.scheduler, self.keep = folder, optimizer, scheduler, keep
        self.is_open = False
        """False until a worker that joins a run is a member of it."""
        self._locked: RunFolder | None = None
        self._before_redo: tuple[int, Mapping[str, Any], int] | None = None
        """When a step has failed, from before it: the last committed step, options and schedule, the step to save."""

    def open(self, patience: float = 0.0) -> None:
        """Prepare the folder and the saves; all ranks call it together, and wait `patience` seconds for the lock."""
        optimizer, model = self.optimizer, self.optimizer.model
        for name, buffer in saved_buffers(model.module).items():
            if buffer.dtype not in DTYPES:
                raise TypeError(f"the buffer {name} is {buffer.dtype}, which a checkpoint cannot hold")
        self._lock_folder(patience)
        optimizer.before_redo = self._remember
        self.probe = dict(take_probe(model.arena.device))
        parameters, trained = model.module.named_parameters(), model.arena.parameters
        frozen = {name: value for name, value in parameters if name not in trained}
        state = {
            "script": Path(sys.argv[0]).name,
            "slots": model.membership.order.slots,
            "seed": model.seed,
            "frozen": weights_blake3(frozen),
            "probe": self.probe,
        }
        facts = RunFacts(
            folder=self.folder / "checkpoints",
            state=state,
            files={},
            folder_mark=partial(read_mark, self.folder),
            check=partial(self._check, state),
            progress=lambda: schedule_of(optimizer, self.scheduler),
        )
        self.checkpointer = Checkpointer(optimizer, facts, SaveSettings(keep=self.keep), self._report)
        optimizer.passengers.append(self.checkpointer)
        model.before_step = self._stop_if_agreed
        optimizer.before_end = self._finish_saves
        optimizer.on_halt = self.checkpointer.after_halt
        model.group.before_close.append(self.close)
        self.is_open = True

    @property
    def is_rank_0(self) -> bool:
        return self.optimizer.model.membership.rank == 0

    def _lock_folder(self, patience: float) -> None:
        """Lock the folder on rank 0 (in a later generation another worker), before any rank reads its mark."""
        if self.is_rank_0 and self._locked is None:
            self._locked = RunFolder(self.folder)
            self._locked.take(patience)
        self.optimizer.model.group.barrier()

    def _remember(self) -> None:
        """A step has failed: keep what the script changes before it repeats the step."""
        schedule = schedule_of(self.optimizer, self.scheduler)
        self._before_redo = self.optimizer.progress.step, schedule, self.checkpointer.asked

    def undo(self) -> None:
        """Restore options and schedule of before a failed step, and forget its save, unless it is committed by now."""
        if self._before_redo and self._before_redo[0] == self.optimizer.progress.step:
            _, schedule, self.checkpointer.asked = self._before_redo
            restore_schedule(self.optimizer, self.scheduler, schedule)
        self._before_redo = None

    @property
    def repeats_step(self) -> bool:
        """Whether the step that has failed is repeated; otherwise a worker was lost after its verdict."""
        return self._before_redo is not None

    def enter(self) -> None:
        """Take part in another generation."""
        if self.is_open:
            self._lock_folder(LOCK_SECONDS)
            self.checkpointer.enter()
        else:
            self.open(LOCK_SECONDS)

    def load(self) -> bool:
        """Load the newest good checkpoint; returns whether there is one."""
        self.checkpointer.finish()  # a save in progress is the newest
        locked = self._locked
        found = find_on_rank_0(self.optimizer.model.group, lambda: locked.resume_from("auto") if locked else None)
        for note in locked.notes if locked else ():
            self._print(note)
        if found:
            restore_schedule(self.optimizer, self.scheduler, self.checkpointer.load(found))
        return found is not None

    def save(self, step: int) -> None:
        """Begin to save a step."""
        optimizer, done, self.checkpointer.asked = self.optimizer, self.optimizer.progress.step, step + 1
        if optimizer.failure:  # a worker was lost: the step is repeated, or saved in the next generation
            return
        if step != done - 1:
            raise ValueError(f"step {step} cannot be saved: the last of {done} steps, counted from 0, was {done - 1}")
        try:
            self.checkpointer.save(done, patience=PATIENCE_SECONDS)
        except GroupError as failure:
            if not optimizer.goes_on:
                raise
            optimizer.failure = failure

    def _stop_if_agreed(self) -> None:
        """Before a step: if a stop was asked for, save and exit."""
        if self.optimizer.stop.agreed:
            self.checkpointer.save(self.optimizer.progress.step, wait=True)
            self._print(f"Stopped after step {self.optimizer.progress.step}, which is saved in {self.folder}")
            raise SystemExit(EXIT_STOPPED)

    def _finish_saves(self) -> None:
        """After the last step: wait for its save, which a lost worker may still interrupt."""
        self.checkpointer.finish()
        self.checkpointer.save_if_skipped()

    def close(self) -> None:
        """Wait with all ranks for a save in progress, and unlock the folder."""
        try:
            with closing(self.checkpointer):
                self.checkpointer.finish()
        finally:
            if self._locked:
                self._locked.close()
        if self.checkpointer.failure:
            raise self.checkpointer.failure

    def _check(self, state: Mapping[str, Any], folder: Path, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another model, or with another number of slots or seed."""
        if "script" not in saved:
            cause = "`andon train` saved it"
            raise UserError(f"{folder} is not a checkpoint of a script", cause, "Choose another folder")
        changed = [
            f"{key} {saved.get(key)} → {state[key]}" for key in ("slots", "seed") if saved.get(key) != state[key]
        ]
        if saved.get("frozen") != state["frozen"]:
            changed.append("the parameters that are not trained")
        if changed:
            what = f"{folder} was saved with other settings: {', '.join(changed)}"
            cause = "The run would continue with another model, or with other random numbers"
            raise UserError(what, cause, "Keep these, or choose another folder")
        if operations := differing(self.probe, saved.get("probe", {})):
            self._print(other_bits(operations))

    def _report(self, kind: str, **fields: Any) -> None:
        if kind == "note":
            self._print(fields["text"])
        elif kind == "save_failed":
            again = "trying again" if fields["again"] else "the earlier checkpoints are intact"
            self._print(f"Checkpoint {fields['step']} was not written: {fields['reason']}; {again}")

    def _print(self, text: str) -> None:
        if self.is_rank_0:
            print(harmless(text), file=sys.stderr, flush=True)


def _checkpoints(
    folder: str | Path, model: DataParallel, optimizer: Optimizer, scheduler: LRScheduler | None, keep: int
) -> ScriptCheckpoints:
    """The checkpoints of an optimizer, opened by the first call unless the worker has yet to join."""
    if optimizer.model is not model:
        raise ValueError("the optimizer was made for another model")
    path, group = expand(folder).resolve(), model.membership.group
    checkpoints = checkpoints_of(optimizer)
    if checkpoints is None:
        checkpoints = ScriptCheckpoints(path, optimizer, scheduler, keep)
        if not (isinstance(group, ChangingGroup) and group.joins):
            checkpoints.open()
        optimizer.checkpoints = checkpoints
    if checkpoints.folder != path:
        raise ValueError(f"the checkpoints of this optimizer are in {checkpoints.folder}, not in {path}")
    checkpoints.scheduler = scheduler or checkpoints.scheduler
    return checkpoints


def checkpoints_of(optimizer: Optimizer) -> ScriptCheckpoints | None:
    """The checkpoints of an optimizer, if the script has called `save` or `load`."""
    assert optimizer.checkpoints is None or isinstance(optimizer.checkpoints, ScriptCheckpoints)
    return optimizer.checkpoints


def schedule_of(optimizer: Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """The optimizer's options and the scheduler's state, as JSON."""
    state = scheduler.state_dict() if scheduler else None
    return {"options": to_json(optimizer.options), "scheduler": to_json(state)}


def restore_schedule(optimizer: Optimizer, scheduler: LRScheduler | None, saved: Mapping[str, Any]) -> None:
    """Set options and scheduler to what `schedule_of` returned."""
    optimizer.param_groups[0].update(from_json(saved["options"]))
    if scheduler and saved["scheduler"] is not None:
        scheduler.load_state_dict(from_json(saved["scheduler"]))
