"""Saving beside training: one rank's part of the save protocol (`andon.checkpoint.protocol`).

At a save point every rank requests the save and a thread takes its snapshot beside the next forward and
backward. The rank's *word* on the save travels with the words that every step exchanges anyway; before it
speaks, it waits for what is left of its snapshot, so that no rank updates a weight before all snapshots are
taken. All ranks hear the same words at the same step and move through the same phases: once they are
synced, a second thread, of the lowest priority, writes this rank's files, and rank 0 publishes when all are
written.

A save that fails is tried once more from the same snapshot; then it is given up, which never touches an
earlier checkpoint. Where nothing follows that could carry the words (the last step, Ctrl-C, a halt, a
second save point while a save runs) `finish` exchanges them by themselves, as signs of life, until the save
is through.
"""

from __future__ import annotations

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

from andon.checkpoint.background import be_humble, beside
from andon.checkpoint.format import At, write_tensors, write_text
from andon.checkpoint.manifest import Record
from andon.checkpoint.protocol import Phase, Save
from andon.checkpoint.snapshot import Snapshot
from andon.checkpoint.store import Store
from andon.errors import UserError
from andon.integrity.faults import Faults
from andon.integrity.fingerprint import who
from andon.integrity.halt import JidokaHalt
from andon.transport.base import Group

BEAT = 0.2  # seconds between signs of life
CLOSING = 10.0  # seconds that a cancelled write has to notice it
TIDYING = 10.0  # seconds that a save without room leaves to the removal of what is old
ATTEMPTS = 2
Tell = Callable[..., None]
"""Called with the kind and the fields of an event."""


class Cancelled(Exception):
    """The save was given up while this thread was at work."""


class Saver:
    """Saves the checkpoints of a run together with the other ranks; `seconds`: the longest one may take;
    `may_write` raises `OSError` if the folder is not this run's any more."""

    def __init__(
        self,
        group: Group,
        store: Store,
        snapshot: Snapshot,
        faults: Faults,
        tell: Tell,
        seconds: float = 1800.0,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.group, self.store, self.faults, self.tell = group, store, faults, tell
        self._may_write = may_write
        self.leads = group.rank == 0
        self.saved = -1
        """The step that was saved last."""
        self.failure: UserError | None = None
        """Why the last save failed, if it did; the same on every rank."""
        self.stall = 0.0
        """Seconds that training has waited for the save that runs, or ran last."""
        self.snapshot = snapshot
        self._save = Save(group.world_size, seconds)
        self._texts: Mapping[str, str] = {}
        self._units: tuple[str, ...] | None = None
        self._records: dict[str, Any] = {}
        self._task: Future[Any] | None = None
        self._tidying: Future[Any] | None = None
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
        self._try(step)
        self.stall = time.perf_counter() - started

    def save_now(self, step: int, texts: Mapping[str, str]) -> None:
        """Save the current step and wait until it is on disk."""
        self.request(step, texts)
        self.finish()
        if self.failure:
            raise self.failure

    def _try(self, step: int) -> None:
        self._attempt += 1
        self._records, self._publishing, self._cancel = {}, False, threading.Event()
        accepted = self._save.request(step)
        assert accepted, self._save.phase
        at = partial(self._at, self._cancel, step)
        take = partial(self._take, step, self._save.turn, at)
        self._task = beside("andon-snapshot", self._same_threads, take)

    @property
    def step(self) -> int:
        """The step of the save that runs, or ran last."""
        return self._save.step

    def word(self) -> Any:
        """What this rank says with this step's words; first its snapshot, a copy in memory, must be there."""
        if self._task and self._save.phase is Phase.REQUESTED and self._attempt == 1:
            started = time.perf_counter()
            wait([self._task])
            self.stall += time.perf_counter() - started
        return self._word()

    def _word(self) -> list[Any]:
        save, task, kind = self._save, self._task, ""
        value: Any = None
        mine = self.group.rank in save.awaited or (self.leads and self._publishing)
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

    def hear(self, words: Sequence[Any]) -> None:
        """All ranks' words: move on with the others."""
        for rank, (_, kind, turn, value) in enumerate(words):
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
        if not any(kind for _, kind, _, _ in words):  # a long step must not make what is done late
            self._save.look(words[0][0])
        self._move_on()

    def _move_on(self) -> None:
        save = self._save
        at = partial(self._at, self._cancel, save.step)
        if save.phase is Phase.SYNCED:
            save.begin_writing()
            self._task = beside("andon-write", be_humble, partial(self._write, save.step, save.turn, at))
        elif save.all_wrote and self.leads and not self._publishing:
            self._publishing = True
            work = partial(self._publish, save.step, save.turn, at)
            self._task = beside("andon-write", be_humble, work)
        elif save.phase is Phase.COMPLETE:
            save.resume()
            self._completed()
            if self.leads:
                at = partial(self._at, threading.Event(), save.step)  # it is not given up with a later save
                self._tidying = beside("andon-tidy", be_humble, partial(self.store.prune, save.step, at))
        elif not save.running and self._task:
            self._cancel.set()
            self._task = None
            self._failed()

    def _completed(self) -> None:
        step, self._task = self._save.step, None
        self.saved = step
        while self._notes:
            self.tell("note", text=self._notes.pop(0))
        self._tell_of_tidying()
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
            acks = [save.acks[rank] for rank in range(self.group.world_size)]
            causes = (
                f"the weights of {units[index]} differ{who([ack[index] for ack in acks])}"
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
        self.tell(
            "save_failed", step=save.step, reason=save.reason, folder=str(self.store.folder), again=again
        )
        if again:
            self.failure = None
            self._try(save.step)
        else:
            discard = partial(self._discard, save.step, save.turn)
            self._tidying = beside("andon-tidy", be_humble, discard)

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
                wait([self._task], BEAT)
            gathered = self.group.all_gather_bytes(json.dumps(self._word()).encode())
            words = [json.loads(word) for word in gathered]
            self.stall += time.perf_counter() - started
            self.hear(words)
            now = words[0][0]  # of one clock, so that all ranks end alike
            until = min(until, now + patience)
            if now >= until:
                break
        return not self._save.running

    def close(self) -> None:
        """Give up what is being written; what hangs in a disk does not hold the process for long."""
        self._cancel.set()
        wait([task for task in (self._task, self._tidying) if task], CLOSING)
        self._tell_of_tidying()

    def _tell_of_tidying(self) -> None:
        """What could not be removed stays, and is said once."""
        if self._tidying and self._tidying.done():
            if error := self._tidying.exception():
                self.tell("note", text=f"Old checkpoints could not be removed: {_reason(error)}")
            self._tidying = None

    def _at(self, cancel: threading.Event, step: int, place: str) -> None:
        if cancel.is_set():
            raise Cancelled
        self.faults.at(place, step)

    def _take(self, step: int, turn: int, at: At) -> tuple[str, ...]:
        """The snapshot, unless the first attempt has taken it; what that one wrote makes room."""
        if self._attempt > 1:
            self._wait_for_room(at)
            self._discard(step, turn - 1)
        elif self._units is None:
            self._units = self.snapshot.take(at)
        if self._units is None:
            raise RuntimeError("its snapshot could not be taken, and by now the weights have moved on")
        return self._units

    def _wait_for_room(self, at: At) -> None:
        """Until what is old has been removed, but not for long: that may hang."""
        tidying, until = self._tidying, time.monotonic() + min(TIDYING, self._save.seconds / 4)
        while tidying and not tidying.done() and time.monotonic() < until:
            wait([tidying], BEAT)
            at("tidy")

    def _lacks_room(self) -> bool:
        """Whether what this rank writes seems not to fit, with a tenth for what surrounds the tensors."""
        folder, needed = self.store.folder, self.snapshot.size + sum(map(len, self._texts.values()))
        return folder.exists() and shutil.disk_usage(folder).free < 1.1 * needed

    def _discard(self, step: int, turn: int) -> None:
        if self.leads:
            self.store.discard(step, turn)

    def _write(self, step: int, turn: int, at: At) -> dict[str, Record]:
        """This rank's files."""
        snapshot, records = self.snapshot, {}
        if not self.leads and not snapshot.moments:
            return {}
        if self.leads and self.saved >= 0 and not self.store.folder.exists():
            self._notes.append(f"{self.store.folder} was gone and has been made again")
        if self._lacks_room():
            self._wait_for_room(at)
        self._may_write()
        folder = self.store.begin(step, turn)
        if self.leads:
            name = "model.safetensors"
            records[name] = write_tensors(folder / name, snapshot.weights, snapshot.digests, at)
            for name, text in self._texts.items():
                records[name] = write_text(folder / name, text, at)
        if snapshot.moments:
            name = f"optimizer-{self.group.rank:05}-of-{snapshot.shards:05}.safetensors"
            records[name] = write_tensors(folder / name, snapshot.moments, {}, at)
        at("wrote")
        return records

    def _publish(self, step: int, turn: int, at: At) -> Path:
        files = {
            name: Record(said["size"], said["blake3"], said.get("tensors", {}))
            for name, said in self._records.items()
        }
        assert self._units is not None
        names = [unit.name for unit in self.snapshot.arena.layout.units]
        units = dict(zip(names, self._units, strict=True))
        return self.store.publish(self.store.temporary(step, turn), files, units, at)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"
