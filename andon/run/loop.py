"""The loop of a run: steps, and what happens between them: events, evaluation, samples, the end."""

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from andon.checkpoint.store import weights_blake3
from andon.config.schema import Config, RunSettings
from andon.data.batches import Batches
from andon.data.token_set import TokenSet
from andon.engine.optimizer import Totals
from andon.engine.trainer import Trainer
from andon.integrity.halt import JidokaHalt
from andon.model.llama import Llama
from andon.run import evaluate as evaluation
from andon.run.events import Emit, event, no_event
from andon.transport.base import Group

T = TypeVar("T")
BUSY = b"busy"
HEARTBEAT = 0.2  # seconds between signs of life of a rank 0 that is busy


class Loop:
    """One rank's run, of whatever kind; rank 0 emits events and samples for all."""

    def __init__(self, config: RunSettings, data: str, trainer: Trainer, emit: Emit) -> None:
        self.settings, self.data, self.trainer = config, data, trainer
        self.is_rank_0 = trainer.model.membership.rank == 0
        self.emit: Emit = emit if self.is_rank_0 else no_event
        self._step_began = time.monotonic()
        trainer.on_step = self._emit_step

    def floor(self) -> float | None:
        """The least loss that the data allows, if that is known."""
        return None

    def step_facts(self) -> dict[str, Any]:
        """What a step event says besides loss, tokens and times."""
        return {}

    def before_first_step(self) -> None:
        """What a new run does before it trains."""

    def evaluate(self) -> dict[str, Any]:
        """Emit and give how good the model is on held-out data, with its `loss`; all ranks together."""
        raise NotImplementedError

    def between_steps(self) -> None:
        """What happens after a step that is not the last, besides evaluation."""

    def end(self, result: dict[str, Any]) -> dict[str, Any]:
        """What the summary says besides, with `samples`; all ranks together."""
        raise NotImplementedError

    @property
    def group(self) -> Group:
        """The group, free for another collective."""
        return self.trainer.model.group

    def train(self) -> None:
        """Train to the last step, or until some rank wants to stop."""
        try:
            self._loop()
        except JidokaHalt as halt:
            self.emit(event("halt", **halt.fields(), data=self.data))
            if self.trainer.checkpointer:
                self.trainer.checkpointer.after_halt(halt)
            raise

    def _loop(self) -> None:
        steps, progress = self.settings.train.steps, self.trainer.progress
        transport, probe = self.settings.group.transport, dict(self.settings.probe)
        self.emit(
            event("start", step=progress.step, transport=transport, floor=self.floor(), data=self.data, probe=probe)
        )
        if not progress.step:
            self.before_first_step()
        while progress.step < steps:
            self._step_began = time.monotonic()
            self.trainer.train_step()
            if self.trainer.stop.agreed:
                self.emit(event("stopped", step=progress.step))
                return
            if progress.step < steps:
                every = self.settings.eval.every
                if every and progress.step % every == 0:
                    self.evaluate()
                self.between_steps()
        self._finish()

    def _emit_step(self, totals: Totals) -> None:
        seconds = time.monotonic() - self._step_began
        timings = self.trainer.model.phases.milliseconds
        self.emit(
            event(
                "step",
                step=self.trainer.progress.step,
                loss=totals.loss,
                tokens=totals.tokens,
                tokens_per_s=round(totals.tokens / seconds, 1),
                lr=self.trainer.optimizer.lr,
                grad_norm=totals.norm,
                **self.step_facts(),
                **{f"{phase}_ms": round(milliseconds, 3) for phase, milliseconds in timings.items()},
            )
        )

    def _finish(self) -> None:
        result, progress = self.evaluate(), self.trainer.progress
        more = self.end(result)
        if self.is_rank_0:
            summary = {
                "step": progress.step,
                "tokens": progress.tokens,
                "loss": progress.loss,
                "validation_loss": result["loss"],
                "weights_blake3": weights_blake3(self.trainer.model.arena.parameters),
                "transport": self.settings.group.transport,
                "workers": self.group.world_size,
                "skipped": progress.skipped,
            }
            self.emit(event("done", **summary, **more))
        self.group.barrier()


class Run(Loop):
    """One rank's pretraining run."""

    def __init__(self, config: Config, tokens: TokenSet, trainer: Trainer, emit: Emit) -> None:
        super().__init__(config, tokens.digest, trainer, emit)
        self.config, self.tokens = config, tokens
        self.tokenizer = tokens.tokenizer()
        self.on_stories = config.data.corpus == ("stories",)
        self._sampled = time.monotonic()

    def between_steps(self) -> None:
        """Show a sample every now and then."""
        seconds, step = self.config.eval.sample_every, self.trainer.progress.step
        if self.is_rank_0 and seconds and time.monotonic() - self._sampled > seconds:
            self.emit(event("sample", step=step, text=self.write(1, seed=step)[0]))
            self._sampled = time.monotonic()

    def evaluate(self) -> dict[str, Any]:
        """Loss on held-out windows and, for the built-in stories, the share of valid samples."""
        trainer, batches = self.trainer, self.trainer.batches
        assert isinstance(batches, Batches)
        with trainer.autocast():
            windows = batches.validation(self.config.eval.windows)
            loss = evaluation.validation_loss(self.llama, windows, self.group)
        bits = evaluation.bits_per_byte(loss, self.tokens.bytes_per_token)
        result: dict[str, Any] = {"step": trainer.progress.step, "loss": loss, "bits_per_byte": bits}
        if self.on_stories and self.config.eval.stories:
            score = while_others_wait(self.group, self.story_score)
            result |= {"valid_share": score.valid_share, "known": score.known} if score else {}
        self.emit(event("eval", **result))
        return result

    @property
    def llama(self) -> Llama:
        model = self.trainer.model.module
        assert isinstance(model, Llama)
        return model

    def story_score(self) -> evaluation.StoryScore:
        """The valid share of sampled stories, and how many of them the training text holds."""
        samples = self.write(self.config.eval.stories, self.config.seed)
        return evaluation.story_score(samples, self.config.seed, self.config.data.stories)

    def floor(self) -> float | None:
        """The least loss that the built-in stories allow: the grammar's entropy per token."""
        if not self.on_stories:
            return None
        return evaluation.loss_floor(self.config.data.stories, self.tokens.token_count)

    def write(self, count: int, seed: int) -> list[str]:
        """Sample texts from the model as it is."""
        with self.trainer.autocast(), self._eager():
            temperature = self.config.eval.temperature
            return evaluation.write(self.llama, self.tokenizer, count, temperature, seed)

    def _eager(self) -> contextlib.AbstractContextManager[Any]:
        """Sampling has other shapes at every token: compiled blocks would be compiled again and again."""
        # It loads torch's compiler, 1.5 s, so only where it is loaded already.
        compiled = self.config.train.compile
        return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()

    def end(self, result: dict[str, Any]) -> dict[str, Any]:
        """Bits per byte, stories and samples for the summary."""
        step = self.trainer.progress.step
        samples = while_others_wait(self.group, lambda: self.write(3, seed=step))
        told: dict[str, Any] = {key: result[key] for key in ("bits_per_byte", "valid_share", "known") if key in result}
        return {**told, "samples": samples}


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
        while not wait([task], timeout=HEARTBEAT).done:
            group.all_gather_bytes(BUSY)
    group.all_gather_bytes(b"")
    return task.result()
