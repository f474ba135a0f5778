"""Saving during training: one rank's part of the save protocol (`checkpoint.protocol`).

At a save point every rank requests the save, and a background thread takes its snapshot during the next forward and
backward. The rank's *status* of the save travels with the exchange that every step has anyway. A rank waits for its
snapshot before it sends that status, so that no rank updates a weight before all snapshots are taken. All ranks receive
the same statuses at the same step, so all are in the same phase. When they are synced, a second thread of the lowest
priority writes this rank's files. When all files are written, rank 0 publishes the checkpoint.

A save that fails is tried again once, from the same snapshot; then it is given up, which never touches an earlier
checkpoint. Where no further step carries the statuses (the last step, Ctrl-C, a halt, a second save point during a
save) `finish` exchanges them every `POLL_SECONDS`, until the save has ended.
"""

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from andon.checkpoint.background import background, lowest_priority
from andon.checkpoint.disk.format import At, write_tensors, write_text
from andon.checkpoint.disk.listing import checkpoint_path
from andon.checkpoint.disk.manifest import Record, parse_record
from andon.checkpoint.disk.store import Store
from andon.checkpoint.protocol import Phase, Save
from andon.checkpoint.snapshot import Snapshot
from andon.engine.parallel import DataParallel
from andon.errors import UserError
from andon.integrity.fingerprint import blame_by_majority
from andon.integrity.halt import JidokaHalt

POLL_SECONDS = 0.2  # between exchanges of the status when no step carries it
CANCEL_SECONDS = 10.0  # for a cancelled write to end
REMOVAL_SECONDS = 10.0  # that a save on a full disk waits for the removal of old checkpoints
ATTEMPTS = 2
Report = Callable[..., None]
"""Called with the kind and the fields of an event."""


class Saver:
    """Saves the checkpoints of a run together with the other ranks; a save may take `seconds` at most."""

    def __init__(
        self, model: DataParallel, store: Store, snapshot: Snapshot, report: Report, seconds: float = 1800.0
    ) -> None:
        self.model, self.store, self.snapshot, self.report = model, store, snapshot, report
        self.is_rank_0 = model.membership.rank == 0
        self.saved = -1
        """The step that was saved last."""
        self.failure: UserError | None = None
        """Why the last save failed, if it did; the same on every rank."""
        self.stall = 0.0
        """Seconds that training has waited for the current save, or for the last one."""
        self._save = Save(model.membership.world_size, seconds)
        self._texts: Mapping[str, str] = {}
        self._units: dict[str, str] = {}
        """The digest of each unit's weights, once the snapshot is taken."""
        self._records: dict[str, Any] = {}
        """Of the files that the ranks have written, as JSON."""
        self._task: Future[Any] | None = None
        self._removal: Future[Any] | None = None
        self._cancel = threading.Event()
        self._attempt, self._publishing, self._started = 0, False, 0.0
        self._notes: list[str] = []
        # A new thread starts with torch's default number, and setting any other number changes it for all threads.
        self._same_threads = partial(torch.set_num_threads, torch.get_num_threads())

    def request(self, step: int, texts: Mapping[str, str]) -> None:
        """Begin to save the current step, when no save is running; rank 0 also writes `texts`, by file name."""
        self._texts, self._units, self._attempt, self.failure = texts, {}, 0, None
        self._started = time.perf_counter()
        self.snapshot.begin()
        self._try(step)
        self.stall = time.perf_counter() - self._started

    def _try(self, step: int) -> None:
        self._attempt += 1
        self._records, self._publishing, self._cancel = {}, False, threading.Event()
        accepted = self._save.request(step)
        assert accepted, self._save.phase
        self._work(self._same_threads, self._take)

    def _work(self, prepare: Callable[[], None], part: Callable[[int, int, At], Any]) -> None:
        """Run a part of the save in the background; `status` reports its result."""
        save = self._save
        work = partial(part, save.step, save.turn, partial(self._at, self._cancel, save.step))
        self._task = background(work, prepare)

    @property
    def step(self) -> int:
        """The step of the current save, or of the last one."""
        return self._save.step

    def status(self) -> list[Any]:
        """What this rank sends with a step's exchange, once its snapshot, a copy in memory, is taken."""
        if self._task and self._save.phase is Phase.REQUESTED and self._attempt == 1:
            started = time.perf_counter()
            if self.snapshot.on_gpu:  # a later step sends the digests of the copies
                while not (self._task.done() or self.snapshot.copied.wait(POLL_SECONDS)):
                    pass
            else:
                wait([self._task])
            self.stall += time.perf_counter() - started
        return self._finished_work()

    def _finished_work(self) -> list[Any]:
        """[this rank's clock, kind, turn, value]; the kind is empty if there is nothing to report."""
        save, task, kind = self._save, self._task, ""
        value: Any = None
        due = self.model.membership.rank in save.awaited or self._publishing
        if task and task.done() and due:
            if error := task.exception():
                kind, value = "failed", _reason(error)
            elif save.phase is Phase.REQUESTED:
                kind, value = "ack", list(self._units.values())
            elif self._publishing:
                kind, value = "complete", str(task.result())
            else:
                kind, value = "wrote", {name: record.fields() for name, record in task.result().items()}
        return [time.monotonic(), kind, save.turn, value]

    def receive(self, statuses: Sequence[Any]) -> None:
        """Take the statuses of all ranks, and advance with the others."""
        for rank, (_, kind, turn, value) in enumerate(statuses):
            match kind:
                case "ack":
                    self._save.ack(rank, turn, tuple(value))
                case "wrote":
                    self._save.wrote(rank, turn)
                    self._records |= value
                case "complete":
                    self._save.complete(turn)
                case "failed":
                    self._save.fail(rank, turn, value)
        # A step longer than the deadline must not count as a timeout of work that was done in time.
        if not any(kind for _, kind, _, _ in statuses):
            self._save.check_deadline(statuses[0][0])
        self._advance()

    def _advance(self) -> None:
        save = self._save
        if save.phase is Phase.SYNCED:
            save.begin_writing()
            self._work(lowest_priority, self._write)
        elif save.all_wrote and self.is_rank_0 and not self._publishing:
            self._publishing = True
            self._work(lowest_priority, self._publish)
        elif save.phase is Phase.COMPLETE:
            save.resume()
            self._completed()
        elif not save.running and self._task:
            self._cancel.set()
            self._task = None
            self._failed()

    def _completed(self) -> None:
        step, self._task = self._save.step, None
        self.saved = step
        while self._notes:
            self.report("note", text=self._notes.pop(0))
        self._report_removal()
        self.report(
            "checkpoint",
            step=step,
            path=str(checkpoint_path(self.store.folder, step)),
            seconds=round(time.perf_counter() - self._started, 3),
            stall_ms=round(1e3 * self.stall, 3),
        )
        if self.is_rank_0:
            at = partial(self._at, threading.Event(), step)  # giving up a later save does not cancel the removal
            self._removal = background(partial(self.store.prune, step, at), lowest_priority)

    def _failed(self) -> None:
        save = self._save
        if save.differing:
            names, acks = list(self._units), [ack for _, ack in sorted(save.acks.items())]
            causes = (
                f"the weights of {names[index]} differ{blame_by_majority([ack[index] for ack in acks])}"
                for index in save.differing
            )
            cause = f"{'; '.join(causes)} (found when step {save.step} was to be saved)"
            raise JidokaHalt(save.step + 1, cause, sound=False)
        again = self._attempt < ATTEMPTS
        self.report("save_failed", step=save.step, reason=save.reason, folder=str(self.store.folder), again=again)
        if again:
            self._try(save.step)
            return
        self.failure = UserError(
            f"Checkpoint {save.step} could not be written to {self.store.folder}",
            save.reason,
            "Free some space or choose another --run.dir; the earlier checkpoints are intact",
        )
        if self.is_rank_0:
            discard = partial(self.store.discard, save.step, save.turn)
            self._removal = background(discard, lowest_priority)

    def give_up(self, step: int, reason: str) -> None:
        """Give up the save of a step, if it is running: its snapshot is in doubt. All ranks call it together."""
        if self._save.running and self._save.step == step:
            self._cancel.set()
            self._save.abort(reason)
            self._task = None
            self.report("save_failed", step=step, reason=reason, folder=str(self.store.folder), again=False)

    def finish(self, patience: float = math.inf) -> bool:
        """Wait with all ranks until no save is running, `patience` seconds at most; False: one still is."""
        until = math.inf
        while self._save.running:
            started = time.perf_counter()
            if self._task:
                wait([self._task], POLL_SECONDS)
            statuses = self.model.group.all_gather_json(self._finished_work())
            self.stall += time.perf_counter() - started
            self.receive(statuses)
            now = statuses[0][0]  # the clock of rank 0, so that all ranks stop waiting together
            until = min(until, now + patience)
            if now >= until:
                break
        return not self._save.running

    def close(self) -> None:
        """Give up the save that is running; a thread that hangs in the disk delays the process only briefly."""
        self._cancel.set()
        self._save.abort("it was given up")
        wait([task for task in (self._task, self._removal) if task], CANCEL_SECONDS)
        self._report_removal()

    def _report_removal(self) -> None:
        """Report once that old checkpoints could not be removed."""
        if self._removal and self._removal.done():
            if error := self._removal.exception():
                self.report("note", text=f"Old checkpoints could not be removed: {_reason(error)}")
            self._removal = None

    def _at(self, cancel: threading.Event, step: int, place: str) -> None:
        if cancel.is_set():
            raise CancelledError
        self.model.phases.on_enter(place, step)

    def _take(self, step: int, turn: int, at: At) -> None:
        """Take the snapshot; the second attempt uses that of the first, and removes what the first has written."""
        if self._attempt == 1:
            self._units = self.snapshot.take(at)
        else:
            self._wait_for_room(at)
            if self.is_rank_0:
                self.store.discard(step, turn - 1)
        if not self._units:
            raise RuntimeError("its snapshot could not be taken, and the weights have changed since")

    def _wait_for_room(self, at: At) -> None:
        """Wait until old checkpoints are removed, but not for long: the disk may hang."""
        removal, until = self._removal, time.monotonic() + min(REMOVAL_SECONDS, self._save.seconds / 4)
        while removal and not removal.done() and time.monotonic() < until:
            wait([removal], POLL_SECONDS)
            at("remove")

    def _lacks_room(self) -> bool:
        """Whether this rank's files seem not to fit on the disk; a tenth is added for headers and the file system."""
        folder, needed = self.store.folder, self.snapshot.size + sum(map(len, self._texts.values()))
        return folder.exists() and shutil.disk_usage(folder).free < 1.1 * needed

    def _write(self, step: int, turn: int, at: At) -> dict[str, Record]:
        """Write this rank's files."""
        snapshot, records = self.snapshot, {}
        if not self.is_rank_0 and not snapshot.moments:
            return {}
        if self.is_rank_0 and self.saved >= 0 and not self.store.folder.exists():
            self._notes.append(f"{self.store.folder} was gone and has been made again")
        if self._lacks_room():
            self._wait_for_room(at)
        folder = self.store.begin(step, turn)
        if self.is_rank_0:
            name = "model.safetensors"
            records[name] = write_tensors(folder / name, snapshot.weights | snapshot.buffers, snapshot.digests, at)
            for name, text in self._texts.items():
                records[name] = write_text(folder / name, text, at)
        if snapshot.moments:
            name = f"optimizer-{self.model.membership.rank:05}-of-{snapshot.shards:05}.safetensors"
            records[name] = write_tensors(folder / name, snapshot.moments, {}, at)
        at("wrote")
        return records

    def _publish(self, step: int, turn: int, at: At) -> Path:
        files = {name: parse_record(name, fields) for name, fields in self._records.items()}
        return self.store.publish(step, turn, files, self._units, at)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
