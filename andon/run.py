"""A run: the loop over steps, with what happens between them: events, saves, evaluation, samples, the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from andon import evaluation
from andon.checkpoint.listing import should_save
from andon.checkpoint.store import Store, weights_blake3
from andon.data import stories
from andon.errors import UserError
from andon.gradients import Totals
from andon.group.base import Group
from andon.integrity.halt import JidokaHalt
from andon.metrics import Emit, Event, event
from andon.trainer import Trainer

T = TypeVar("T")
BUSY = b"busy"
BEAT = 0.2  # seconds between signs of life


class Run:
    """One rank's run; rank 0 speaks, saves and samples for all."""

    def __init__(self, trainer: Trainer, emit: Emit) -> None:
        self.trainer, self.transport = trainer, trainer.config.group.transport
        self.config, self.group = trainer.config, trainer.group
        self.leads = self.group.rank == 0
        self.emit: Emit = emit if self.leads else _nothing
        self.tokenizer = trainer.tokens.tokenizer()
        self.store = Store(self.config.run.dir / "checkpoints", self.config.checkpoint.keep)
        self.on_stories = self.config.data.corpus == ("stories",)
        self.sampled = time.monotonic()

    def train(self, stop_wanted: Callable[[], bool]) -> None:
        """Train to the last step, or until someone wants to stop; save on the way and at the end."""
        steps = self.config.train.steps
        data, step = self.trainer.tokens.digest, self.trainer.step
        self.emit(event("start", step=step, transport=self.transport, floor=self.floor(), data=data))
        while self.trainer.step < steps:
            totals = self._step(stop_wanted())
            if totals.stop or should_save(self.trainer.step, self.config.checkpoint.every, steps):
                self.save()
            if totals.stop:
                self.emit(event("stopped", step=self.trainer.step))
                return
            if self.trainer.step < steps:
                self._between_steps()
        self._finish()

    def _step(self, stop: bool) -> Totals:
        started = time.perf_counter()
        try:
            totals, timings = self.trainer.train_step(stop)
        except JidokaHalt as halt:
            self.emit(event("halt", **halt.fields(), data=self.trainer.tokens.digest))
            if halt.sound and self.trainer.step:
                self._save_before_leaving()
            raise
        self.emit(self._step_event(totals, time.perf_counter() - started, timings))
        return totals

    def _save_before_leaving(self) -> None:
        """Keep the last committed step; the halt is what matters, so that a failure is only noted."""
        try:
            self.save()
        except UserError as error:
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
        training = set(stories.stories(self.config.seed, self.config.data.stories))
        samples = self.write(self.config.eval.stories, self.config.seed)
        return evaluation.story_score(samples, training.__contains__)

    def floor(self) -> float | None:
        """The least loss that the built-in stories allow: the grammar's entropy per token."""
        if not self.on_stories:
            return None
        return stories.entropy() * self.config.data.stories / self.trainer.tokens.tokens

    def write(self, count: int, seed: int) -> list[str]:
        """Sample texts from the model as it is."""
        # Sampling has other shapes at every token: compiled blocks would be compiled again and again.
        with self.trainer.autocast(), torch.compiler.set_stance("force_eager"):
            temperature = self.config.eval.temperature
            return evaluation.write(self.trainer.model, self.tokenizer, count, temperature, seed)

    def save(self) -> None:
        """Save a checkpoint of the current step; rank 0 writes, the others wait until it is on disk."""
        started = time.perf_counter()
        snapshot = self.trainer.snapshot()
        folder = while_others_wait(self.group, lambda: self.store.save(snapshot))
        seconds = round(time.perf_counter() - started, 3)
        self.emit(event("checkpoint", step=self.trainer.step, path=str(folder), seconds=seconds))

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


def _nothing(said: Event) -> None:
    """Only rank 0 speaks."""
