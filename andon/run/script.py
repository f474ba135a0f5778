"""`andon.save` and `andon.load`: the checkpoints of a script, as verified and asynchronous as those of `andon train`.

A script's checkpoints lie in FOLDER/checkpoints, and FOLDER is locked while the script runs. `checkpoint-N` holds what
was there after N steps. The first of the two calls prepares the folder together with all ranks; from then on a save
travels with the steps that follow it, and `group.close` waits for the last one.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
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
from andon.engine.recovery.commit import Settlement
from andon.errors import EXIT_STOPPED, UserError, harmless
from andon.files import expand
from andon.integrity.probe import differing, take_probe
from andon.run.loop import while_others_wait
from andon.run.records.folder import RunFolder, read_mark
from andon.transport.base import GroupError
from andon.transport.changing import ChangingGroup


def load(
    folder: str | Path, model: DataParallel, optimizer: Optimizer, scheduler: LRScheduler | None = None, keep: int = 3
) -> int:
    """Go on from the newest good checkpoint: the number of the next step, counted from 0; 0 if there is none.

    All ranks call it together, with any number of workers. It also names the folder, and the scheduler, that a stop
    saves; `keep` newest checkpoints stay."""
    found = _checkpoints(folder, model, optimizer, scheduler, keep)
    return found.load() if isinstance(found, ScriptCheckpoints) else optimizer.progress.step


def save(
    folder: str | Path,
    model: DataParallel,
    optimizer: Optimizer,
    step: int,
    scheduler: LRScheduler | None = None,
    keep: int = 3,
) -> None:
    """Save after a step, counted from 0, while the steps after it go on. All ranks call it together."""
    found = _checkpoints(folder, model, optimizer, scheduler, keep)
    assert isinstance(found, ScriptCheckpoints), "a worker that has not joined has nothing to save"
    found.save(step)


def digest(module: nn.Module) -> str:
    """BLAKE3 over a module's state: in the order of names, each name and its bytes."""
    return weights_blake3(module.state_dict())


class ScriptCheckpoints:
    """The checkpoints of one optimizer of a script."""

    def __init__(self, folder: Path, optimizer: Optimizer, scheduler: LRScheduler | None, keep: int) -> None:
        self.folder, self.optimizer, self.scheduler = folder, optimizer, scheduler
        model, group = optimizer.model, optimizer.model.group
        for name, buffer in saved_buffers(model.module).items():
            if buffer.dtype not in DTYPES:
                raise TypeError(f"the buffer {name} is {buffer.dtype}, which a checkpoint cannot hold")
        self._held: RunFolder | None = None
        self._take_folder()
        self._before_redo: tuple[int, Mapping[str, Any]] | None = None
        """The step after which one has failed, and options and schedule at that moment."""
        optimizer.before_redo = self._remember
        self.probe = dict(take_probe(model.arena.device))
        state = {
            "script": Path(sys.argv[0]).name,
            "slots": model.membership.order.slots,
            "seed": model.seed,
            "frozen": _frozen_digest(model),
            "probe": self.probe,
        }
        facts = RunFacts(
            folder=folder / "checkpoints",
            state=state,
            files={},
            folder_mark=partial(read_mark, folder),
            check=partial(self._check, state),
            progress=self._progress,
        )
        self.checkpointer = Checkpointer(optimizer, facts, SaveSettings(keep=keep), self._tell)
        optimizer.passengers.append(self.checkpointer)
        model.before_step = self._stop_if_agreed
        optimizer.on_halt = self.checkpointer.after_halt
        group.before_close.append(self.close)

    @property
    def is_rank_0(self) -> bool:
        return self.optimizer.model.membership.rank == 0

    def _take_folder(self) -> None:
        """Rank 0 locks the folder; in a later generation that may be another worker."""
        if self.is_rank_0 and self._held is None:
            self._held = RunFolder(self.folder)
            self._held.take()

    def _remember(self) -> None:
        """A step has failed: what the script does after it, to the schedule, is to be undone."""
        self._before_redo = self.optimizer.progress.step, self._progress()

    def undo(self) -> None:
        """A step has failed: unless it was committed later, options and schedule are set back."""
        if self._before_redo and self._before_redo[0] == self.optimizer.progress.step:
            self._restore(self._before_redo[1])
        self._before_redo = None

    def enter(self) -> None:
        """Another generation begins."""
        self._take_folder()
        self.checkpointer.enter()

    def _restore(self, progress: Mapping[str, Any]) -> None:
        """Options and schedule as they were."""
        self.optimizer.param_groups[0].update(_from_plain(progress["options"]))
        if self.scheduler and progress["scheduler"] is not None:
            self.scheduler.load_state_dict(_from_plain(progress["scheduler"]))

    def load(self) -> int:
        """Load the newest good checkpoint; the number of the next step."""
        group = self.optimizer.model.group
        held = self._held
        # Every byte of the checkpoint is verified here, which may take longer than the group's timeout.
        found = while_others_wait(group, lambda: held and held.resume_from("auto"))
        for note in held.notes if held else ():
            self._print(note)
        path = group.all_gather_bytes(str(found or "").encode())[0].decode()
        if path:
            self._restore(self.checkpointer.load(Path(path)))
        return self.optimizer.progress.step

    def save(self, step: int) -> None:
        """Begin to save a step."""
        optimizer, done = self.optimizer, self.optimizer.progress.step
        if optimizer.failure:  # a worker was lost: the step comes again
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
        """Before a step: if a stop was asked for, save what is there and leave."""
        if self.optimizer.stop.agreed:
            self.checkpointer.save(self.optimizer.progress.step, wait=True)
            self._print(f"Stopped after step {self.optimizer.progress.step}, which is saved in {self.folder}")
            raise SystemExit(EXIT_STOPPED)

    def close(self) -> None:
        """Wait with all ranks for a save that is on its way, and unlock the folder."""
        try:
            with closing(self.checkpointer):
                self.checkpointer.finish()
        finally:
            if self._held:
                self._held.close()
        if self.checkpointer.failure:
            raise self.checkpointer.failure

    def _progress(self) -> Mapping[str, Any]:
        state = self.scheduler.state_dict() if self.scheduler else None
        return {"options": _to_plain(self.optimizer.options), "scheduler": _to_plain(state)}

    def _check(self, state: Mapping[str, Any], folder: Path, saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that another model or another division of the work has made."""
        if "script" not in saved:
            cause = "`andon train` saved it"
            raise UserError(f"{folder} is not a checkpoint of a script", cause, "Choose another folder")
        changed = [
            f"{key} {saved.get(key)} → {state[key]}" for key in ("slots", "seed") if saved.get(key) != state[key]
        ]
        if saved.get("frozen") != state["frozen"]:
            changed.append("the parameters that are not trained")
        if changed:
            cause = "It would go on with another model, or with other random numbers"
            raise UserError(
                f"{folder} was made otherwise: {', '.join(changed)}", cause, "Keep these, or choose another folder"
            )
        if operations := differing(self.probe, saved.get("probe", {})):
            self._print(f"Going on with other bits: this machine computes {', '.join(operations)} otherwise")

    def _tell(self, kind: str, **fields: Any) -> None:
        if kind == "note":
            self._print(fields["text"])
        elif kind == "save_failed":
            again = "trying again" if fields["again"] else "the earlier checkpoints are intact"
            self._print(f"Checkpoint {fields['step']} was not written: {fields['reason']}; {again}")

    def _print(self, text: str) -> None:
        if self.is_rank_0:
            print(harmless(text), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Later:
    """Checkpoints that a worker which joins a run will have once it is a member."""

    folder: Path
    scheduler: LRScheduler | None
    keep: int


def part_from_generation(optimizer: Optimizer) -> None:
    """Leave a generation, whatever has become of its group."""
    if isinstance(optimizer.checkpoints, ScriptCheckpoints):
        optimizer.checkpoints.checkpointer.close()
    optimizer.model.part()


def enter_generation(optimizer: Optimizer, settled: Settlement) -> None:
    """Checkpoints, options and schedule of a script in another generation; all its members call it together."""
    group, known = optimizer.model.membership.group, optimizer.checkpoints
    if isinstance(known, ScriptCheckpoints):
        known.undo()  # before others take it over
    mine = known._progress() if isinstance(known, ScriptCheckpoints) else {"options": _to_plain(optimizer.options)}
    told = group.all_gather_bytes(json.dumps([known is not None, mine]).encode())
    has, progress = zip(*map(json.loads, told), strict=True)
    if len(set(has)) > 1:
        cause = "The workers have checkpoints, and one that joins has none"
        raise UserError("A worker cannot take part", cause, "Call andon.load before `for step in model.steps(…)`")
    if isinstance(known, Later):
        optimizer.checkpoints = ScriptCheckpoints(known.folder, optimizer, known.scheduler, known.keep)
    elif isinstance(known, ScriptCheckpoints):
        known.enter()
    if settled.lost:
        _go_back(optimizer)
    elif group.rank in settled.new:
        source = next(rank for rank in range(group.world_size) if rank not in settled.new)
        given = {"scheduler": None, **progress[source]}
        if isinstance(optimizer.checkpoints, ScriptCheckpoints):
            optimizer.checkpoints._restore(given)
        else:
            optimizer.param_groups[0].update(_from_plain(given["options"]))


def _go_back(optimizer: Optimizer) -> None:
    """A part of the state is lost: all go back to the newest checkpoint."""
    if not isinstance(optimizer.checkpoints, ScriptCheckpoints) or not optimizer.checkpoints.load():
        cause = "A worker was lost that alone had a part of the optimizer's state, and there is no checkpoint"
        raise UserError("The run cannot go on", cause, 'Save now and then, or make the optimizer with zero="off"')


def _checkpoints(
    folder: str | Path, model: DataParallel, optimizer: Optimizer, scheduler: LRScheduler | None, keep: int
) -> ScriptCheckpoints | Later:
    """The checkpoints of an optimizer, prepared by the first call."""
    if optimizer.model is not model:
        raise ValueError("the optimizer was made for another model")
    path = expand(folder).resolve()
    group = model.membership.group
    if isinstance(group, ChangingGroup) and group.joins:
        optimizer.checkpoints = Later(path, scheduler, keep)
        return optimizer.checkpoints
    if optimizer.checkpoints is None:
        optimizer.checkpoints = ScriptCheckpoints(path, optimizer, scheduler, keep)
    known = optimizer.checkpoints
    assert isinstance(known, ScriptCheckpoints)
    if known.folder != path:
        raise ValueError(f"the checkpoints of this optimizer are in {known.folder}, not in {path}")
    known.scheduler = scheduler or known.scheduler
    return known


def _frozen_digest(model: DataParallel) -> str:
    trained = model.arena.parameters
    return weights_blake3({name: value for name, value in model.module.named_parameters() if name not in trained})


def _to_plain(value: Any) -> Any:
    """A scheduler's state or an optimizer's options as JSON, with the types that JSON does not know."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Counter():
            return {"counter": [[_to_plain(key), count] for key, count in value.items()]}
        case dict():
            return {"dict": [[_to_plain(key), _to_plain(each)] for key, each in value.items()]}
        case list() | tuple():
            return {type(value).__name__: [_to_plain(each) for each in value]}
    raise TypeError(f"a {type(value).__name__} cannot be saved: only numbers, texts, lists and dictionaries can")


def _from_plain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, items), *_ = value.items()
    if kind in ("dict", "counter"):
        found = {_from_plain(key): _from_plain(each) for key, each in items}
        return Counter(found) if kind == "counter" else found
    return (tuple if kind == "tuple" else list)(_from_plain(each) for each in items)
