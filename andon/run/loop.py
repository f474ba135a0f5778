"""The loop of a run of any kind: its steps, the events and evaluations between them, other generations, the end."""

import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

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
from andon.run.records.events import Emit, event
from andon.run.records.folder import DamagedCheckpoint, newest_good
from andon.run.records.ledger import LedgerReports
from andon.transport.base import Group

T = TypeVar("T")
BUSY = b"busy"
HEARTBEAT_SECONDS = 0.2  # between the messages with which a busy rank 0 shows that it is alive
HALT_SAMPLES, TEXT_CHARS = 8, 600  # samples that a halt shows, and characters of each


class Loop(ABC):
    """One rank's run; rank 0 emits the events for all."""

    def __init__(
        self, config: RunSettings, data: str, trainer: Trainer, emit: Emit, ledger: LedgerReports | None = None
    ) -> None:
        self.settings, self.data, self.trainer = config, data, trainer
        self._emit, self._ledger = emit, ledger
        self._started, self._reported = False, 0
        self._start_time = self._step_start_time = time.monotonic()
        self._tokens_before = 0
        trainer.on_step = self._emit_step

    @abstractmethod
    def set_first_weights(self) -> None:
        """Give the model the weights with which the run began; rank 0 calls it and sends them to the others."""

    @abstractmethod
    def evaluate(self) -> dict[str, Any]:
        """Evaluate the model on held-out data, emit and return the result, with its `loss`; all ranks together."""

    @abstractmethod
    def end(self, result: dict[str, Any]) -> dict[str, Any]:
        """More fields of the summary, from the last evaluation, and with `samples`; all ranks together."""

    @abstractmethod
    def texts(self, samples: Sequence[int | str]) -> dict[str, str]:
        """The beginnings of samples that a halt names, by their names."""

    def floor(self) -> float | None:
        """The least loss that the data allows, if it is known."""
        return None

    def step_facts(self, tokens_per_s: float) -> dict[str, Any]:
        """More fields of a `step` event."""
        return {}

    def generation_begins(self) -> None:  # noqa: B027 (not every kind of run needs it)
        """Called when a generation begins; all ranks together."""

    def before_first_step(self) -> None:  # noqa: B027
        """Called before a run that starts from its first weights; all ranks together."""

    def between_steps(self) -> None:  # noqa: B027
        """Called after every step but the last, and after its evaluation."""

    @property
    def is_rank_0(self) -> bool:
        return self.trainer.model.membership.rank == 0

    @property
    def group(self) -> Group:
        """The group, when no exchange is in progress."""
        return self.trainer.model.group

    def emit(self, kind: str, **fields: Any) -> None:
        """Emit an event, if this is rank 0."""
        if self.is_rank_0:
            self._emit(event(kind, **fields))

    def train(self) -> None:
        """Train to the last step, or until a stop was asked for; `MembersChange` if members join or leave first."""
        if not self._started:
            self._start()
        try:
            self._loop()
        except JidokaHalt as halt:
            named = dict.fromkeys(sample for finding in halt.findings for sample in finding.samples)
            texts = self.texts(list(named)[:HALT_SAMPLES])
            self.emit("halt", **halt.fields(), data=self.data, texts=texts)
            if self.trainer.checkpointer:
                self.trainer.checkpointer.after_halt(halt)
            raise

    def _start(self) -> None:
        """Emit the `start` of a generation."""
        config, progress = self.settings, self.trainer.progress
        self.emit(
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
        self.generation_begins()
        if not self._started:
            self._tokens_before = progress.tokens
        self._started, self._reported = True, progress.step

    def go_on(self, recovery: Recovery, recorded: int, since: float) -> None:
        """Continue in another generation, which began to form at `since`: bring all ranks to the same step.

        The ledger has the steps up to `recorded`; the others are reported again."""
        progress, commit = self.trainer.progress, self.trainer.optimizer.commit
        if recovery.lost:
            self._go_back(recovery)
        if self.is_rank_0 and commit.verdict:
            self._emit_step(Totals.of(commit.verdict[0]))  # the rank that committed it may not have emitted it
        self._start()  # the first generation may have ended before its `start` event
        self._reported = recorded
        self._report(progress.step)
        membership = self.trainer.model.membership
        self.emit(
            "generation",
            generation=membership.generation,
            workers=membership.world_size,
            step=progress.step,
            seconds=round(time.monotonic() - since, 3),
            joined=len(recovery.new),
            lost_state=recovery.lost,
        )
        if self.trainer.checkpointer:
            self.trainer.checkpointer.after_change()

    def _go_back(self, recovery: Recovery) -> None:
        """A part of the state is lost: all ranks go back to the newest checkpoint, or to the first weights."""
        trainer, damaged = self.trainer, list[DamagedCheckpoint]()
        folder = self.settings.run.dir / "checkpoints"
        found = find_on_rank_0(self.group, lambda: newest_good(folder, damaged))
        for damage in damaged:
            self.emit("damaged", step=step_of(damage.path), reason=damage.reason)
            self.emit("note", text=damage.note)
        if found:
            trainer.resume(found)
        else:
            while_others_wait(self.group, self.set_first_weights)
            self.group.broadcast(trainer.model.arena.weights, src=0)
            trainer.optimizer.rule.weights_changed(set(trainer.model.arena.parameters))
            trainer.progress.restore(Progress().fields())
            trainer.optimizer.go_on_from(0)
            if trainer.checkpointer:
                trainer.checkpointer.go_back_to_first()
        if self._ledger:
            kept = [record for step, record in recovery.records.items() if step <= trainer.progress.step]
            self._ledger.report(kept)  # the steps in the checkpoint stay committed
            self._ledger.went_back(self.group.generation, trainer.progress.step)

    def _report(self, until: int, everyone: bool = False) -> None:
        """Report the steps that every rank has committed, for the ledger."""
        if self._ledger and (self.is_rank_0 or everyone):
            for record in self.trainer.optimizer.commit.records_of(self._reported + 1, until):
                self._ledger.report([record])
            self._reported = until

    def _loop(self) -> None:
        steps, progress, optimizer = self.settings.train.steps, self.trainer.progress, self.trainer.optimizer
        if not progress.step:
            self.before_first_step()
        while progress.step < steps:
            self._step_start_time = time.monotonic()
            self.trainer.train_step()
            self._report(progress.step - 1)  # a rank takes part in a step only after it has committed the one before
            if optimizer.stop.agreed:
                self._end()
                self.emit("stopped", step=progress.step)
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
        """Before members leave, save this step if their part of the state would be lost with them."""
        optimizer, checkpointer = self.trainer.optimizer, self.trainer.checkpointer
        if optimizer.shrink.agreed and optimizer.ownership.sharded and checkpointer:  # replicas may leave together
            checkpointer.save(self.trainer.progress.step, wait=True)
        self.group.barrier()
        self._report(self.trainer.progress.step)

    def _end(self) -> None:
        """The last exchange of a run: after it every rank has committed the last step."""
        self.group.barrier()
        self._report(self.trainer.progress.step, everyone=True)

    def _emit_step(self, totals: Totals) -> None:
        rate = totals.tokens / (time.monotonic() - self._step_start_time)
        phases = self.trainer.model.phases
        more: dict[str, Any] = {f"{name}_ms": round(each, 3) for name, each in phases.milliseconds.items()}
        if phases.of_ranks:
            more["rank_ms"] = phases.of_ranks
        more |= self.step_facts(rate)
        if not totals.sound:
            more["skipped"] = totals.complaint
        self.emit(
            "step",
            step=self.trainer.progress.step,
            loss=totals.loss,
            tokens=totals.tokens,
            tokens_per_s=round(rate, 1),
            lr=self.trainer.optimizer.lr,
            grad_norm=totals.norm,
            **more,
        )

    def _finish(self) -> None:
        progress = self.trainer.progress
        if self.trainer.checkpointer:
            self.trainer.checkpointer.after(progress.step, last=True)  # again, in case the members have changed since
        result = self.evaluate()
        more = self.end(result)
        peak = peak_memory(self.trainer.model.arena.device)
        peaks = [int(each) for each in self.group.all_gather_bytes(str(peak).encode())]
        seconds = time.monotonic() - self._start_time
        if self.is_rank_0:
            self.emit(
                "done",
                step=progress.step,
                tokens=progress.tokens,
                loss=progress.loss,
                validation_loss=result["loss"],
                weights_blake3=weights_blake3(self.trainer.model.arena.parameters),
                transport=self.settings.group.transport,
                workers=self.group.world_size,
                skipped=progress.skipped,
                seconds=round(seconds, 1),
                tokens_per_s=round((progress.tokens - self._tokens_before) / seconds, 1),
                peak_memory=max(peaks),
                **more,
            )
        self._end()


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of its GPU's memory, or resident, shared memory included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def find_on_rank_0(group: Group, find: Callable[[], Path | None]) -> Path | None:
    """The checkpoint that rank 0 finds, on every rank; verifying it may take longer than the group's timeout."""
    found = while_others_wait(group, find)
    path = group.all_gather_bytes(str(found or "").encode())[0].decode()
    return Path(path) if path else None


def while_others_wait(group: Group, work: Callable[[], T]) -> T | None:
    """Do work on rank 0 that may take longer than the group's timeout; heartbeats tell the others that it is alive."""
    if group.world_size == 1:
        return work()
    if group.rank:
        while group.all_gather_bytes(b"")[0] == BUSY:
            pass
        return None
    with ThreadPoolExecutor(1, "andon-rank-0") as thread:
        task = thread.submit(work)
        while not wait([task], timeout=HEARTBEAT_SECONDS).done:
            group.all_gather_bytes(BUSY)
    group.all_gather_bytes(b"")
    return task.result()
