"""The loop of a run, of whatever kind: steps, and what happens between them: events, evaluation, the end."""

import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from andon.checkpoint.disk.listing import step_of
from andon.checkpoint.disk.store import weights_blake3
from andon.config.schema import RunSettings
from andon.engine.membership import MembersChange
from andon.engine.progress import Progress
from andon.engine.recovery.commit import Recovery
from andon.engine.trainer import Trainer
from andon.engine.verdict import Totals
from andon.integrity.halt import JidokaHalt
from andon.run.records.events import Emit, event, no_event
from andon.run.records.folder import DamagedCheckpoint, newest_good
from andon.transport.base import Group

T = TypeVar("T")
BUSY = b"busy"
TEXTS_OF_HALT, LONGEST_TEXT = 8, 600  # samples that a halt shows, and characters of each
HEARTBEAT = 0.2  # seconds between signs of life of a rank 0 that is busy


class Books(Protocol):
    """Where a rank reports what the run's ledger is to say."""

    def report(self, records: Sequence[Any]) -> None:
        """These steps are committed."""
        ...

    def went_back(self, generation: int, step: int) -> None:
        """A generation goes on from the checkpoint of a step."""
        ...


class Loop(ABC):
    """One rank's run; rank 0 emits events and samples for all."""

    def __init__(
        self, config: RunSettings, data: str, trainer: Trainer, emit: Emit, books: Books | None = None
    ) -> None:
        self.settings, self.data, self.trainer = config, data, trainer
        self._emit, self._books = emit, books
        self._begun, self._reported = False, 0
        self._began = self._step_began = time.monotonic()
        self._tokens = 0
        trainer.on_step = self._emit_step

    @abstractmethod
    def set_first_weights(self) -> None:
        """Give the model the weights with which the run has begun; rank 0 calls it and sends them to the others."""

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Emit and give how good the model is on held-out data, with its `loss`; all ranks together."""

    @abstractmethod
    def end(self, result: dict[str, Any]) -> dict[str, Any]:
        """What the summary says of the last evaluation and besides, with `samples`; all ranks together."""

    @abstractmethod
    def texts(self, samples: Sequence[int | str]) -> dict[str, str]:
        """The beginnings of samples that a halt names, by their names."""

    def floor(self) -> float | None:
        """The least loss that the data allows, if that is known."""
        return None

    def step_facts(self, tokens_per_s: float) -> dict[str, Any]:
        """What a `step` event says besides loss, tokens and times."""
        return {}

    def generation_begins(self) -> None:  # noqa: B027 (not every kind does something)
        """What is done when a generation begins; all ranks together."""

    def before_first_step(self) -> None:  # noqa: B027
        """What a run does before it trains; all ranks together."""

    def between_steps(self) -> None:  # noqa: B027
        """What happens after a step that is not the last, besides evaluation."""

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
            named = dict.fromkeys(sample for finding in halt.findings for sample in finding.samples)
            texts = self.texts(list(named)[:TEXTS_OF_HALT])
            self.emit(event("halt", **halt.fields(), data=self.data, texts=texts))
            if self.trainer.checkpointer:
                self.trainer.checkpointer.after_halt(halt)
            raise

    def _begin(self) -> None:
        """The run starts, or resumes: its first generation begins."""
        config, progress = self.settings, self.trainer.progress
        self.emit(
            event(
                "start",
                step=progress.step,
                transport=config.group.transport,
                floor=self.floor(),
                data=self.data,
                probe=dict(config.probe),
                steps=config.train.steps,
                workers=self.group.world_size,
                generation=self.group.generation,
                parameters=sum(value.numel() for value in self.trainer.model.arena.parameters.values()),
                model=Path(config.model_name).name,
                frozen=self.trainer.model.frozen,
            )
        )
        self.generation_begins()
        self._begun, self._reported = True, progress.step

    def go_on(self, recovery: Recovery, recorded: int, since: float) -> None:
        """Another generation begins, with a ledger up to a step: bring everyone to the same step, and say so."""
        progress, commit = self.trainer.progress, self.trainer.optimizer.commit
        if recovery.lost:
            self._go_back(recovery)
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
                joined=len(recovery.new),
                lost_state=recovery.lost,
            )
        )

    def _go_back(self, recovery: Recovery) -> None:
        """A part of the state is lost: all go back to the newest checkpoint, or to the first weights."""
        trainer, damaged = self.trainer, list[DamagedCheckpoint]()
        folder = self.settings.run.dir / "checkpoints"
        found = while_others_wait(self.group, lambda: newest_good(folder, damaged))
        path = self.group.all_gather_bytes(str(found or "").encode())[0].decode()
        for damage in damaged:
            self.emit(event("damaged", step=step_of(damage.path), reason=damage.reason))
            self.emit(event("note", text=damage.note))
        if path:
            trainer.resume(Path(path))
        else:
            while_others_wait(self.group, self.set_first_weights)
            self.group.broadcast(trainer.model.arena.weights, src=0)
            trainer.optimizer.rule.weights_changed(set(trainer.model.arena.parameters))
            trainer.progress.restore(Progress().fields())
            trainer.optimizer.go_on_from(0)
        if self._books:
            kept = [record for step, record in recovery.records.items() if step <= trainer.progress.step]
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
        steps, progress, optimizer = self.settings.train.steps, self.trainer.progress, self.trainer.optimizer
        if not progress.step:
            self.before_first_step()
        while progress.step < steps:
            self._step_began = time.monotonic()
            self.trainer.train_step()
            self._report(progress.step - 1)  # nobody has come to this step who has not committed the one before
            if optimizer.stop.agreed:
                self._end()
                self.emit(event("stopped", step=progress.step))
                return
            if progress.step < steps:
                every = self.settings.eval.every
                if every and progress.step % every == 0:
                    self.evaluate()
                self.between_steps()
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
                **self.step_facts(rate),
                **skipped,
            )
        )

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
        more = self.end(result)
        peak = peak_memory(self.trainer.model.arena.device)
        peaks = [int(each) for each in self.group.all_gather_bytes(str(peak).encode())]
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
                **self._cost(peaks),
            }
            self.emit(event("done", **summary, **more))
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
