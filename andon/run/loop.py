"""The loop of a run: steps, and what happens between them: events, evaluation, samples, the end."""

import contextlib
import gc
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from andon.checkpoint.listing import step_of
from andon.checkpoint.store import weights_blake3
from andon.config.schema import Config
from andon.data.batches import Batches
from andon.data.token_set import TokenSet
from andon.engine.membership import MembersChange
from andon.engine.optimizer import Totals
from andon.engine.progress import Progress
from andon.engine.recovery.commit import Settlement
from andon.engine.trainer import Trainer
from andon.integrity.halt import JidokaHalt
from andon.model.llama import Llama
from andon.run import evaluate as evaluation
from andon.run.events import Emit, event, no_event
from andon.run.folder import DamagedCheckpoint, newest_good
from andon.run.mfu import mfu, peak_of_all
from andon.transport.base import Group

T = TypeVar("T")
BUSY = b"busy"
TEXTS_OF_HALT = 8
LONGEST_TEXT = 600  # characters of a sample in a halt
HEARTBEAT = 0.2  # seconds between signs of life of a rank 0 that is busy


class Books(Protocol):
    """Where a rank reports what the run's ledger is to say."""

    def report(self, records: Sequence[Any]) -> None:
        """These steps are committed."""
        ...

    def went_back(self, generation: int, step: int) -> None:
        """A generation goes on from the checkpoint of a step."""
        ...


class Run:
    """One rank's run; rank 0 emits events and samples for all."""

    def __init__(
        self, config: Config, tokens: TokenSet, trainer: Trainer, emit: Emit, books: Books | None = None
    ) -> None:
        self.config, self.tokens, self.trainer = config, tokens, trainer
        self._emit, self._books = emit, books
        self._begun, self._reported = False, 0
        self.tokenizer = tokens.tokenizer()
        self.on_stories = config.data.corpus == ("stories",)
        self._began = self._sampled = self._step_began = time.monotonic()
        self._tokens = 0
        self._peak: float | None = None
        """Of all GPUs of this generation."""
        self._just_compiled = self.llama.compiled
        trainer.on_step = self._emit_step

    @property
    def is_rank_0(self) -> bool:
        return self.trainer.model.membership.rank == 0

    @property
    def emit(self) -> Emit:
        """Emits events, on rank 0."""
        return self._emit if self.is_rank_0 else no_event

    @property
    def group(self) -> Group:
        """The group, free for another collective."""
        return self.trainer.model.group

    def train(self) -> None:
        """Train to the last step, or until some rank wants to stop; `MembersChange` if somebody waits to join."""
        if not self._begun:
            self._begin()
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

    def _begin(self) -> None:
        """The run starts, or resumes: its first generation begins."""
        transport, data, progress = self.config.group.transport, self.tokens.digest, self.trainer.progress
        self.emit(
            event(
                "start",
                step=progress.step,
                transport=transport,
                floor=self.floor(),
                data=data,
                probe=dict(self.config.probe),
                steps=self.config.train.steps,
                workers=self.group.world_size,
                generation=self.group.generation,
                parameters=self.config.shape.parameters,
                model=self.config.model.preset,
            )
        )
        if self.llama.compute == torch.bfloat16:  # the peaks are those of bf16
            self._peak = peak_of_all(self.group, self.trainer.model.arena.device)
        self._begun, self._reported = True, progress.step

    def go_on(self, settled: Settlement, recorded: int, since: float) -> None:
        """Another generation begins, with a ledger up to a step: bring everyone to the same step, and say so."""
        progress, commit = self.trainer.progress, self.trainer.optimizer.commit
        if settled.lost:
            self._go_back(settled)
        if self.is_rank_0 and commit.verdict:
            self._emit_step(Totals.of(commit.verdict[0]))  # the rank that has committed it may not have said so
        self._begin()  # the first generation may have ended before it has said so
        self._reported = recorded
        self._report(progress.step)
        membership = self.trainer.model.membership
        self.emit(
            event(
                "generation",
                generation=membership.generation,
                workers=membership.world_size,
                step=progress.step,
                seconds=round(time.monotonic() - since, 3),
                joined=len(settled.new),
                lost_state=settled.lost,
            )
        )

    def _go_back(self, settled: Settlement) -> None:
        """A part of the state is lost: all go back to the newest checkpoint, or to the first weights."""
        trainer, damaged = self.trainer, list[DamagedCheckpoint]()
        folder = self.config.run.dir / "checkpoints"
        found = while_others_wait(self.group, lambda: newest_good(folder, damaged))
        path = self.group.all_gather_bytes(str(found or "").encode())[0].decode()
        for damage in damaged:
            self.emit(event("damaged", step=step_of(damage.path), reason=damage.reason))
            self.emit(event("note", text=damage.note))
        if path:
            trainer.resume(Path(path))
        else:
            self.llama.initialise(self.config.seed)
            trainer.optimizer.rule.weights_changed(set(trainer.model.arena.parameters))
            trainer.progress.restore(Progress().fields())
            trainer.optimizer.go_on_from(0)
        if self._books:
            kept = [record for step, record in settled.records.items() if step <= trainer.progress.step]
            self._books.report(kept)  # what the checkpoint holds stays committed
            self._books.went_back(self.group.generation, trainer.progress.step)

    def _report(self, until: int, everyone: bool = False) -> None:
        """Report the steps that every rank has committed, for the ledger."""
        records = self.trainer.optimizer.commit.records
        if self._books and (self.is_rank_0 or everyone):
            for step in range(self._reported + 1, until + 1):
                if step in records:
                    self._books.report([records[step]])
            self._reported = until

    def _loop(self) -> None:
        steps, progress, optimizer = self.config.train.steps, self.trainer.progress, self.trainer.optimizer
        while progress.step < steps:
            self._step_began = time.monotonic()
            self.trainer.train_step()
            if self._just_compiled:
                gc.freeze()  # the compiler leaves very many objects: to look through them takes half a second
                self._just_compiled = False
            self._report(progress.step - 1)  # nobody has come to this step who has not committed the one before
            if optimizer.stop.agreed:
                self._end()
                self.emit(event("stopped", step=progress.step))
                return
            if progress.step < steps:
                self._between_steps()
                if optimizer.change.agreed:
                    self._before_change()
                    raise MembersChange
        self._finish()

    def _before_change(self) -> None:
        """Keep what those who leave would take with them: all go on from a checkpoint of this very step."""
        optimizer, checkpointer = self.trainer.optimizer, self.trainer.checkpointer
        if optimizer.shrink.agreed and optimizer.ownership.sharded and checkpointer:  # replicas may leave together
            checkpointer.save(self.trainer.progress.step, wait=True)
        self.group.barrier()
        self._report(self.trainer.progress.step)

    def _end(self) -> None:
        """The last exchange of a run: when it is over, every rank has committed the last step."""
        self.group.barrier()
        self._report(self.trainer.progress.step, everyone=True)

    def _emit_step(self, totals: Totals) -> None:
        rate = totals.tokens / (time.monotonic() - self._step_began)
        self._tokens += totals.tokens
        phases = self.trainer.model.phases
        used = {} if self._peak is None else {"mfu": round(mfu(self.config.shape, rate, self._peak), 4)}
        skipped = {} if totals.sound else {"skipped": totals.complaint}
        self.emit(
            event(
                "step",
                step=self.trainer.progress.step,
                loss=totals.loss,
                tokens=totals.tokens,
                tokens_per_s=round(rate, 1),
                lr=self.trainer.optimizer.lr,
                grad_norm=totals.norm,
                **{f"{phase}_ms": round(milliseconds, 3) for phase, milliseconds in phases.milliseconds.items()},
                **({"rank_ms": phases.of_ranks} if phases.of_ranks else {}),
                **used,
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
        with self._eager():
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
        with self._eager():
            temperature = self.config.eval.temperature
            return evaluation.write(self.llama, self.tokenizer, count, temperature, seed)

    def _eager(self) -> contextlib.AbstractContextManager[Any]:
        """Sampling has other shapes at every token: compiled blocks would be compiled again and again."""
        # It loads torch's compiler, 1.5 s, so only where it is loaded already.
        compiled = self.llama.compiled
        return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()

    def _cost(self, peaks: list[int]) -> dict[str, float]:
        """What this part of the run took; `peak_memory` is that of the worker that held most."""
        seconds = time.monotonic() - self._began
        speed = round(self._tokens / seconds, 1)
        return {"seconds": round(seconds, 1), "tokens_per_s": speed, "peak_memory": max(peaks)}

    def _finish(self) -> None:
        progress = self.trainer.progress
        if self.trainer.checkpointer:
            self.trainer.checkpointer.after(progress.step, last=True)  # again, if members have changed meanwhile
        result = self.evaluate()
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
        self._end()


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
