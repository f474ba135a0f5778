"""The loop of a run: steps, and what happens between them: events, evaluation, samples, the end."""

import contextlib
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

from andon.checkpoint.store import weights_blake3
from andon.config.schema import Config
from andon.data.batches import Batches
from andon.data.token_set import TokenSet
from andon.engine.optimizer import Totals
from andon.engine.trainer import Trainer
from andon.integrity.halt import JidokaHalt
from andon.model.llama import Llama
from andon.run import evaluate as evaluation
from andon.run.events import Emit, event, no_event
from andon.run.speed import mfu
from andon.transport.base import Group

T = TypeVar("T")
BUSY = b"busy"
TEXTS_OF_HALT = 8
LONGEST_TEXT = 600  # characters of a sample in a halt
HEARTBEAT = 0.2  # seconds between signs of life of a rank 0 that is busy


class Run:
    """One rank's run; rank 0 emits events and samples for all."""

    def __init__(self, config: Config, tokens: TokenSet, trainer: Trainer, emit: Emit) -> None:
        self.config, self.tokens, self.trainer = config, tokens, trainer
        self.is_rank_0 = trainer.model.membership.rank == 0
        self.emit: Emit = emit if self.is_rank_0 else no_event
        self.tokenizer = tokens.tokenizer()
        self.on_stories = config.data.corpus == ("stories",)
        self._began = self._sampled = self._step_began = time.monotonic()
        self._tokens_before = trainer.progress.tokens
        device, autocast = trainer.model.arena.device, trainer.settings.autocast
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" and autocast else ""
        trainer.on_step = self._emit_step

    @property
    def group(self) -> Group:
        """The group, free for another collective."""
        return self.trainer.model.group

    def train(self) -> None:
        """Train to the last step, or until some rank wants to stop."""
        try:
            self._loop()
        except JidokaHalt as halt:
            self.emit(event("halt", **halt.fields(), data=self.tokens.digest, texts=self._texts(halt)))
            if self.trainer.checkpointer:
                self.trainer.checkpointer.after_halt(halt)
            raise

    def _texts(self, halt: JidokaHalt) -> dict[str, str]:
        """The beginnings of the first samples that a halt names, by window."""
        context = self.config.train.context
        windows = dict.fromkeys(window for finding in halt.findings for window in finding.samples)
        read = [(window, self.tokens.read(window * context, context)) for window in list(windows)[:TEXTS_OF_HALT]]
        return {str(window): self.tokenizer.decode(tokens.tolist())[:LONGEST_TEXT] for window, tokens in read}

    def _loop(self) -> None:
        steps, progress = self.config.train.steps, self.trainer.progress
        transport, data = self.config.group.transport, self.tokens.digest
        self.emit(
            event(
                "start",
                step=progress.step,
                transport=transport,
                floor=self.floor(),
                data=data,
                probe=dict(self.config.probe),
                steps=steps,
                workers=self.group.world_size,
                parameters=self.config.shape.parameters,
                model=self.config.model.preset,
            )
        )
        while progress.step < steps:
            self._step_began = time.monotonic()
            self.trainer.train_step()
            if self.trainer.stop.agreed:
                self.emit(event("stopped", step=progress.step))
                return
            if progress.step < steps:
                self._between_steps()
        self._finish()

    def _emit_step(self, totals: Totals) -> None:
        seconds = time.monotonic() - self._step_began
        phases = self.trainer.model.phases
        skipped = {} if totals.sound else {"skipped": totals.complaint}
        part = mfu(
            self.config.shape, totals.tokens / seconds, self.trainer.model.membership.world_size, self.device_name
        )
        self.emit(
            event(
                "step",
                step=self.trainer.progress.step,
                loss=totals.loss,
                tokens=totals.tokens,
                tokens_per_s=round(totals.tokens / seconds, 1),
                lr=self.trainer.optimizer.lr,
                grad_norm=totals.norm,
                **{f"{phase}_ms": round(milliseconds, 3) for phase, milliseconds in phases.milliseconds.items()},
                **({"rank_ms": phases.of_ranks} if phases.of_ranks else {}),
                **({"mfu": round(part, 4)} if part else {}),
                **skipped,
            )
        )

    def _between_steps(self) -> None:
        every, seconds, step = (self.config.eval.every, self.config.eval.sample_every, self.trainer.progress.step)
        if every and step % every == 0:
            self.evaluate()
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

    def _cost(self, peaks: list[int]) -> dict[str, float]:
        """What this part of the run took; `peak_memory` is that of the worker that held most."""
        seconds, tokens = time.monotonic() - self._began, self.trainer.progress.tokens - self._tokens_before
        return {"seconds": round(seconds, 1), "tokens_per_s": round(tokens / seconds, 1), "peak_memory": max(peaks)}

    def _finish(self) -> None:
        result, progress = self.evaluate(), self.trainer.progress
        samples = while_others_wait(self.group, lambda: self.write(3, seed=progress.step))
        peaks = [
            int(peak)
            for peak in self.group.all_gather_bytes(str(peak_memory(self.trainer.model.arena.device)).encode())
        ]
        if self.is_rank_0:
            summary = {
                "step": progress.step,
                "tokens": progress.tokens,
                "loss": progress.loss,
                "validation_loss": result["loss"],
                "bits_per_byte": result["bits_per_byte"],
                "weights_blake3": weights_blake3(self.trainer.model.arena.parameters),
                "transport": self.config.group.transport,
                "workers": self.group.world_size,
                "skipped": progress.skipped,
                **self._cost(peaks),
            }
            summary |= {key: result[key] for key in ("valid_share", "known") if key in result}
            self.emit(event("done", **summary, samples=samples))
        self.group.barrier()


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: on its GPU, or in memory, what it shares included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


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
