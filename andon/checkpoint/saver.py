"""Saving while training goes on: one rank's part of the save protocol (`checkpoint.protocol`).

At a save point every rank requests the save, and a background thread takes its snapshot during the next forward and
backward. The rank's *status* of the save travels with the exchange that every step has anyway. Before it gives that
status the rank waits for what is left of its snapshot, so that no rank updates a weight before all snapshots are taken.
All ranks receive the same statuses at the same step and move through the same phases: once they are synced, a second
thread, of the lowest priority, writes this rank's files, and rank 0 publishes when all are written.

A save that fails is tried once more from the same snapshot; then it is given up, which never touches an earlier
checkpoint. Where no step follows that could carry the statuses (the last step, Ctrl-C, a halt, a second save point
while a save runs) `finish` exchanges them by themselves, every `HEARTBEAT` seconds, until the save has ended.
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from andon.checkpoint.background import background, lowest_priority
from andon.checkpoint.disk.format import At, write_tensors, write_text
from andon.checkpoint.disk.manifest import Record
from andon.checkpoint.disk.store import Store
from andon.checkpoint.protocol import Phase, Save
from andon.checkpoint.snapshot import Snapshot
from andon.engine.parallel import DataParallel
from andon.errors import UserError
from andon.integrity.fingerprint import blame_by_majority
from andon.integrity.halt import JidokaHalt

HEARTBEAT = 0.2  # seconds between exchanges of the status while nothing else is exchanged
CANCELLING = 10.0  # seconds that a cancelled write has to notice it
REMOVING = 10.0  # seconds that a save without room waits for the removal of old checkpoints
ATTEMPTS = 2
Tell = Callable[..., None]
"""Called with the kind and the fields of an event."""


class Cancelled(Exception):
    """The save was given up while this thread was at work."""


class Saver:
    """Saves the checkpoints of a run together with the other ranks; a save may take `seconds` at most."""

    def __init__(
        self, model: DataParallel, store: Store, snapshot: Snapshot, tell: Tell, seconds: float = 1800.0
    ) -> None:
        self.model, self.store, self.snapshot, self.tell = model, store, snapshot, tell
        self.is_rank_0 = model.membership.rank == 0
        self.saved = -1
        """The step that was saved last."""
        self.failure: UserError | None = None
        """Why the last save failed, if it did; the same on every rank."""
        self.stall = 0.0
        """Seconds that training has waited for the save that runs, or ran last."""
        self._save = Save(model.membership.world_size, seconds)
        self._texts: Mapping[str, str] = {}
        self._units: tuple[str, ...] | None = None
        self._records: dict[str, Any] = {}
        self._task: Future[Any] | None = None
        self._removal: Future[Any] | None = None
        self._cancel = threading.Event()
        self._attempt, self._publishing, self._started = 0, False, 0.0
        self._notes: list[str] = []
        # A new thread would take torch's default, and setting another number would change everyone's.
        self._same_threads = partial(torch.set_num_threads, torch.get_num_threads())

    def request(self, step: int, texts: Mapping[str, str]) -> None:
        """Begin to save the current step; `texts` are the files besides the tensors, on rank 0."""
        if step == self.saved:
            return
        started = time.perf_counter()
        self.finish()
        self._texts, self._units, self._attempt, self.failure = texts, None, 0, None
        self._started = time.perf_counter()
        self.snapshot.begin()
        self._try(step)
        self.stall = time.perf_counter() - started

    def _try(self, step: int) -> None:
        self._attempt += 1
        self._records, self._publishing, self._cancel = {}, False, threading.Event()
        accepted = self._save.request(step)
        assert accepted, self._save.phase
        at = partial(self._at, self._cancel, step)
        take = partial(self._take, step, self._save.turn, at)
        self._task = background("andon-snapshot", self._same_threads, take)

    @property
    def step(self) -> int:
        """The step of the save that runs, or ran last."""
        return self._save.step

    def status(self) -> list[Any]:
        """What this rank tells with a step's exchange; its snapshot, a copy in memory, is waited for first."""
        if self._task and self._save.phase is Phase.REQUESTED and self._attempt == 1:
            started = time.perf_counter()
            if self.snapshot.on_gpu:  # the digests of its copies are told with a later step
                while not (self._task.done() or self.snapshot.copied.wait(HEARTBEAT)):
                    pass
            else:
                wait([self._task])
            self.stall += time.perf_counter() - started
        return self._status()

    def _status(self) -> list[Any]:
        """[this rank's clock, kind, turn, value]; the kind is empty if there is nothing to report."""
        save, task, kind = self._save, self._task, ""
        value: Any = None
        mine = self.model.membership.rank in save.awaited or (self.is_rank_0 and self._publishing)
        if task and task.done() and mine:
            if error := task.exception():
                kind, value = "failed", _reason(error)
            elif save.phase is Phase.REQUESTED:
                kind, value = "ack", task.result()
            elif self._publishing:
                kind, value = "complete", str(task.result())
            else:
                kind, value = "wrote", {name: record.fields() for name, record in task.result().items()}
        return [time.monotonic(), kind, save.turn, value]

    def receive(self, statuses: Sequence[Any]) -> None:
        """All ranks' statuses: advance with the others."""
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
        # Work that was done in time must not count as late because a long step carried its report.
        if not any(kind for _, kind, _, _ in statuses):
            self._save.check_deadline(statuses[0][0])
        self._advance()

    def _advance(self) -> None:
        save = self._save
        at = partial(self._at, self._cancel, save.step)
        if save.phase is Phase.SYNCED:
            save.begin_writing()
            work: Callable[[], Any] = partial(self._write, save.step, save.turn, at)
            self._task = background("andon-write", lowest_priority, work)
        elif save.all_wrote and self.is_rank_0 and not self._publishing:
            self._publishing = True
            work = partial(self._publish, save.step, save.turn, at)
            self._task = background("andon-write", lowest_priority, work)
        elif save.phase is Phase.COMPLETE:
            save.resume()
            self._completed()
            if self.is_rank_0:
                at = partial(self._at, threading.Event(), save.step)  # it is not given up with a later save
                prune = partial(self.store.prune, save.step, at)
                self._removal = background("andon-remove", lowest_priority, prune)
        elif not save.running and self._task:
            self._cancel.set()
            self._task = None
            self._failed()

    def _completed(self) -> None:
        step, self._task = self._save.step, None
        self.saved = step
        while self._notes:
            self.tell("note", text=self._notes.pop(0))
        self._report_removal()
        self.tell(
            "checkpoint",
            step=step,
            path=str(self.store.folder / f"checkpoint-{step}"),
            seconds=round(time.perf_counter() - self._started, 3),
            stall_ms=round(1e3 * self.stall, 3),
        )

    def _failed(self) -> None:
        save = self._save
        if save.differing:
            units = [unit.name for unit in self.snapshot.arena.layout.units]
            acks = [save.acks[rank] for rank in range(self.model.membership.world_size)]
            causes = (
                f"the weights of {units[index]} differ{blame_by_majority([ack[index] for ack in acks])}"
                for index in save.differing
            )
            cause = f"{'; '.join(causes)} (found when step {save.step} was to be saved)"
            raise JidokaHalt(save.step + 1, cause, sound=False)
        again = self._attempt < ATTEMPTS
        self.failure = UserError(
            f"Checkpoint {save.step} could not be written to {self.store.folder}",
            save.reason,
            "Free some space or choose another --run.dir; the earlier checkpoints are intact",
        )
        self.tell("save_failed", step=save.step, reason=save.reason, folder=str(self.store.folder), again=again)
        if again:
            self.failure = None
            self._try(save.step)
        else:
            discard = partial(self._discard, save.step, save.turn)
            self._removal = background("andon-remove", lowest_priority, discard)

    def give_up(self, step: int, reason: str) -> None:
        """Drop the save of a step, if it is on its way: what it copied is in doubt. All ranks do so alike."""
        if self._save.running and self._save.step == step:
            self._cancel.set()
            self._save.abort(reason)
            self._task = None
            self.tell("save_failed", step=step, reason=reason, folder=str(self.store.folder), again=False)

    def finish(self, patience: float = math.inf) -> bool:
        """Wait with all ranks until no save is on its way, or for so many seconds; whether none is."""
        until = math.inf
        while self._save.running:
            started = time.perf_counter()
            if self._task:
                wait([self._task], HEARTBEAT)
            told = self.model.group.all_gather_bytes(json.dumps(self._status()).encode())
            statuses = [json.loads(status) for status in told]
            self.stall += time.perf_counter() - started
            self.receive(statuses)
            now = statuses[0][0]  # the clock of rank 0, so that all ranks end alike
            until = min(until, now + patience)
            if now >= until:
                break
        return not self._save.running

    def close(self) -> None:
        """Give up what is being written; what hangs in a disk does not hold the process for long."""
        self._cancel.set()
        wait([task for task in (self._task, self._removal) if task], CANCELLING)
        self._report_removal()

    def _report_removal(self) -> None:
        """Old checkpoints that could not be removed stay; that is reported once."""
        if self._removal and self._removal.done():
            if error := self._removal.exception():
                self.tell("note", text=f"Old checkpoints could not be removed: {_reason(error)}")
            self._removal = None

    def _at(self, cancel: threading.Event, step: int, place: str) -> None:
        if cancel.is_set():
            raise Cancelled
        self.model.phases.on_enter(place, step)

    def _take(self, step: int, turn: int, at: At) -> tuple[str, ...]:
        """Take the snapshot, unless the first attempt has; then remove what that attempt wrote."""
        if self._attempt > 1:
            self._wait_for_room(at)
            self._discard(step, turn - 1)
        elif self._units is None:
            self._units = self.snapshot.take(at)
        if self._units is None:
            raise RuntimeError("its snapshot could not be taken, and by now the weights have moved on")
        return self._units

    def _wait_for_room(self, at: At) -> None:
        """Wait until old checkpoints are removed, but not for long: a disk may hang."""
        removal, until = self._removal, time.monotonic() + min(REMOVING, self._save.seconds / 4)
        while removal and not removal.done() and time.monotonic() < until:
            wait([removal], HEARTBEAT)
            at("remove")

    def _lacks_room(self) -> bool:
        """Whether what this rank writes seems not to fit, with a tenth for what surrounds the tensors."""
        folder, needed = self.store.folder, self.snapshot.size + sum(map(len, self._texts.values()))
        return folder.exists() and shutil.disk_usage(folder).free < 1.1 * needed

    def _discard(self, step: int, turn: int) -> None:
        if self.is_rank_0:
            self.store.discard(step, turn)

    def _write(self, step: int, turn: int, at: At) -> dict[str, Record]:
        """This rank's files."""
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
        files = {
            name: Record(fields["size"], fields["blake3"], fields.get("tensors", {}))
            for name, fields in self._records.items()
        }
        assert self._units is not None
        names = [unit.name for unit in self.snapshot.arena.layout.units]
        units = dict(zip(names, self._units, strict=True))
        return self.store.publish(self.store.temporary(step, turn), files, units, at)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"
