"""A run: the loop over steps, with what happens between them: events, saves, evaluation, samples, the end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from andon.checkpoint.listing import checkpoint_path, should_save
from andon.checkpoint.saver import BEAT, Saver
from andon.checkpoint.snapshot import Snapshot
from andon.checkpoint.store import Store, weights_blake3
from andon.engine.accumulate import Totals
from andon.engine.trainer import Trainer
from andon.errors import UserError
from andon.integrity.halt import JidokaHalt
from andon.run import evaluate as evaluation
from andon.run.events import Emit, Event, event, ignore
from andon.run.folder import read_mark
from andon.transport.base import Group, GroupError

T = TypeVar("T")
BUSY = b"busy"
PATIENCE = 30.0  # seconds that training, or a halt, waits for a save before it goes on without


class Run:
    """One rank's run; rank 0 speaks, saves and samples for all."""

    def __init__(self, trainer: Trainer, emit: Emit) -> None:
        self.trainer, self.transport = trainer, trainer.config.group.transport
        self.config, self.group = trainer.config, trainer.group
        self.leads = self.group.rank == 0
        self.emit: Emit = emit if self.leads else ignore
        self.tokenizer = trainer.tokens.tokenizer()
        self.saver = self._make_saver()
        self.overdue = -1
        """The step whose save has used up our patience."""
        if self.transport != "shm" and not self.config.train.compile:  # shm would take forward's own cores
            trainer.parallel.gather.beside_forward(trainer.model)
        self.on_stories = self.config.data.corpus == ("stories",)
        self.sampled = time.monotonic()

    def _make_saver(self) -> Saver:
        """Each rank writes its own files; if some rank does not see the folder, rank 0 writes them all."""
        group, parallel, settings = self.group, self.trainer.parallel, self.config.checkpoint
        marks = group.all_gather_bytes(read_mark(self.config.run.dir).encode())
        self.alone = len(set(marks)) > 1
        gathered = self.alone and parallel.ownership.shared
        moments = {} if gathered else parallel.moments_to_save(self.alone)
        shards = 1 if self.alone else group.world_size
        snapshot = Snapshot(self.trainer.arena, moments, shards, weights=self.leads)
        store = Store(self.config.run.dir / "checkpoints", settings.keep, settings.keep_every)
        if self.leads:
            store.clean()
        mark = marks[group.rank].decode()

        def may_write() -> None:
            if mark and read_mark(self.config.run.dir) not in (mark, ""):
                raise OSError(f"another run has taken {self.config.run.dir}")

        faults, seconds = self.trainer.faults, settings.timeout
        saver = Saver(group, store, snapshot, faults, self._tell, seconds, may_write)
        if self.trainer.resumed == checkpoint_path(store.folder, self.trainer.step).resolve():
            saver.saved = self.trainer.step
        return saver

    def _tell(self, kind: str, **fields: Any) -> None:
        self.emit(event(kind, **fields))

    def train(self, stop_wanted: Callable[[], bool]) -> None:
        """Train to the last step, or until someone wants to stop; save on the way and at the end."""
        try:
            self._loop(stop_wanted)
        except JidokaHalt as halt:
            self.emit(event("halt", **halt.fields(), data=self.trainer.tokens.digest))
            self._save_before_leaving(halt)
            raise
        finally:
            self.saver.close()

    def _loop(self, stop_wanted: Callable[[], bool]) -> None:
        steps = self.config.train.steps
        data, step = self.trainer.tokens.digest, self.trainer.step
        self.emit(event("start", step=step, transport=self.transport, floor=self.floor(), data=data))
        while self.trainer.step < steps:
            totals = self._step(stop_wanted())
            last = totals.stop or self.trainer.step == steps
            if last or should_save(self.trainer.step, self.config.checkpoint.every, steps):
                self.save(wait=last, patience=math.inf if last else PATIENCE)
            if totals.stop:
                self.emit(event("stopped", step=self.trainer.step))
                return
            if self.trainer.step < steps:
                self._between_steps()
        self._finish()

    def _step(self, stop: bool) -> Totals:
        started = time.perf_counter()
        totals, timings = self.trainer.train_step(stop, self.saver)
        self.emit(self._step_event(totals, time.perf_counter() - started, timings))
        self._stop_if_configured()
        return totals

    def _stop_if_configured(self) -> None:
        if self.saver.failure and self.config.checkpoint.on_failure == "stop":
            raise self.saver.failure

    def save(self, wait: bool, patience: float = math.inf) -> None:
        """Save the current step, beside the steps that follow or now; for a save that is still being written
        it has `patience`, for then the disk is in trouble and training matters more."""
        step = self.trainer.step
        self.trainer.parallel.gather.settle()
        if not self.saver.finish(patience if wait or self.saver.step != self.overdue else 0.0):
            self.overdue = self.saver.step
            text = f"Step {step} is not saved: the save of step {self.overdue} has not ended"
            self.emit(event("note", text=text))
            return
        self._stop_if_configured()
        if self.saver.saved == step:
            return
        if self.alone and self.trainer.parallel.ownership.shared:
            self.saver.snapshot.moments = self.trainer.parallel.moments_to_save(alone=True)
        self.saver.request(step, self.trainer.texts() if self.leads else {})
        if wait:
            if not self.saver.finish(patience):
                self.emit(event("note", text=f"The save of step {step} did not end in {patience:g} s"))
            if self.saver.failure:
                raise self.saver.failure

    def _save_before_leaving(self, halt: JidokaHalt) -> None:
        """Keep the last committed step; the halt is what matters, so that a failure is only noted."""
        try:
            if halt.sound and self.trainer.step:
                self.save(wait=True, patience=PATIENCE)
            if not halt.sound:
                # What differs now may have been copied already; a save of an earlier step was compared since.
                self.saver.give_up(halt.step - 1, halt.cause)
                self.saver.finish(PATIENCE)
        except (UserError, GroupError) as error:
            self.emit(event("note", text=str(error)))

    def _between_steps(self) -> None:
        every, seconds = self.config.eval.every, self.config.eval.sample_every
        if every and self.trainer.step % every == 0:
            self.evaluate()
        due = self.leads and seconds and time.monotonic() - self.sampled > seconds
        if due:
            self.emit(event("sample", step=self.trainer.step, text=self.write(1, seed=self.trainer.step)[0]))
            self.sampled = time.monotonic()

    def evaluate(self) -> dict[str, Any]:
        """Loss on held-out windows and, for the built-in stories, the share of valid samples."""
        trainer = self.trainer
        trainer.parallel.gather.settle()
        windows = trainer.batches.validation(self.config.eval.windows)
        with trainer.autocast():
            loss = evaluation.validation_loss(trainer.model, windows, self.group)
        bits = evaluation.bits_per_byte(loss, trainer.tokens.bytes_per_token)
        result: dict[str, Any] = {"step": trainer.step, "loss": loss, "bits_per_byte": bits}
        if self.on_stories and self.config.eval.stories:
            score = while_others_wait(self.group, self.story_score)
            result |= {"valid_share": score.valid_share, "known": score.known} if score else {}
        self.emit(event("eval", **result))
        return result

    def story_score(self) -> evaluation.StoryScore:
        """The valid share of sampled stories, and how many of them the training text holds."""
        samples = self.write(self.config.eval.stories, self.config.seed)
        return evaluation.story_score(samples, self.config.seed, self.config.data.stories)

    def floor(self) -> float | None:
        """The least loss that the built-in stories allow: the grammar's entropy per token."""
        if not self.on_stories:
            return None
        return evaluation.loss_floor(self.config.data.stories, self.trainer.tokens.token_count)

    def write(self, count: int, seed: int) -> list[str]:
        """Sample texts from the model as it is."""
        self.trainer.parallel.gather.settle()
        with self.trainer.autocast(), self._eager():
            temperature = self.config.eval.temperature
            return evaluation.write(self.trainer.model, self.tokenizer, count, temperature, seed)

    def _eager(self) -> contextlib.AbstractContextManager[Any]:
        """Sampling has other shapes at every token: compiled blocks would be compiled again and again."""
        # It loads torch's compiler, 1.5 s, so only where it is loaded already.
        compiled = self.config.train.compile
        return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()

    def _step_event(self, totals: Totals, seconds: float, timings: dict[str, float]) -> Event:
        return event(
            "step",
            step=self.trainer.step,
            loss=totals.loss,
            tokens=totals.tokens,
            tokens_per_s=round(totals.tokens / seconds, 1),
            lr=self.trainer.learning_rate(self.trainer.step),
            grad_norm=totals.norm,
            **timings,
        )

    def _finish(self) -> None:
        result = self.evaluate()
        samples = while_others_wait(self.group, lambda: self.write(3, seed=self.trainer.step))
        if self.leads:
            summary = {
                "step": self.trainer.step,
                "tokens": self.trainer.tokens_seen,
                "loss": self.trainer.last_loss,
                "validation_loss": result["loss"],
                "bits_per_byte": result["bits_per_byte"],
                "weights_blake3": weights_blake3(self.trainer.arena.parameters),
                "transport": self.transport,
                "workers": self.group.world_size,
                "skipped": self.trainer.skipped,
            }
            summary |= {key: result[key] for key in ("valid_share", "known") if key in result}
            self.emit(event("done", **summary, samples=samples))
        self.group.barrier()


def while_others_wait(group: Group, work: Callable[[], T]) -> T | None:
    """Rank 0 does what may take longer than the group's timeout; the others wait and know that it lives."""
    if group.world_size == 1:
        return work()
    if group.rank:
        while group.all_gather_bytes(b"")[0] == BUSY:
            pass
        return None
    with ThreadPoolExecutor(1, "andon-rank-0") as thread:
        task = thread.submit(work)
        while not wait([task], timeout=BEAT).done:
            group.all_gather_bytes(BUSY)
    group.all_gather_bytes(b"")
    return task.result()
