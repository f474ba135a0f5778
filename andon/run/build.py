"""Building one rank's run from a configuration.

A worker that joins a run has model and optimizer before it has a group. So a run is built in three parts, each from the
one before: the optimizer (with the model), the trainer, the loop. Each kind of run is a subclass with its own model.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from andon.checkpoint.checkpointer import Checkpointer, RunFacts, SaveSettings
from andon.config.schema import RunSettings
from andon.data.cache import Prepared
from andon.engine.loader import BatchSource
from andon.engine.optimizer import AdamW, Optimizer
from andon.engine.parallel import DataParallel
from andon.engine.trainer import StepSettings, Trainer
from andon.errors import UserError
from andon.integrity.faults import Faults
from andon.optim import schedules
from andon.optim.sharding import Zero
from andon.run.loop import Loop
from andon.run.records.events import Emit, event
from andon.run.records.folder import read_mark
from andon.run.records.ledger import LedgerReports
from andon.run.resumable import check_resumable
from andon.transport.base import Group


class Builder(ABC):
    """Builds one rank's run."""

    def __init__(self, config: RunSettings, data: Prepared) -> None:
        self.settings, self.digest = config, data.digest

    @abstractmethod
    def model(self, device: torch.device, reads_weights: bool) -> nn.Module:
        """Build the model on a device; with `reads_weights` it has its first weights, also those of a file."""

    def overlaps_gather(self, module: nn.Module) -> bool:
        """Whether forward may begin before all updated weights have arrived."""
        return False

    @abstractmethod
    def batches(self) -> BatchSource:
        """The batches of the run."""

    @abstractmethod
    def files(self, model: DataParallel) -> Mapping[str, str]:
        """Text files that make a checkpoint a model folder for Hugging Face."""

    @abstractmethod
    def loop(self, trainer: Trainer, emit: Emit, ledger: LedgerReports | None = None) -> Loop:
        """The loop over the steps of a trainer."""

    def warm_up(self, model: DataParallel) -> None:  # noqa: B027 (not every kind compiles)
        """Compile the model of a worker that is about to join, so that the others do not wait for it later."""

    def first(self, group: Group, device: torch.device, emit: Emit) -> Trainer:
        """Build the trainer of a rank of the first generation, with the configuration's injected faults."""
        optimizer = self.optimizer(group, device)
        trainer = self.trainer(optimizer, emit)
        if self.settings.fault:
            inject(self.settings, optimizer)
        return trainer

    def optimizer(self, group: Group, device: torch.device, joins: bool = False) -> Optimizer:
        """Build the model and AdamW; a worker that `joins` a run receives weights and state from the others."""
        config = self.settings
        allow_faster_kernels(config, device)
        module = self.model(device, reads_weights=group.rank == 0 and not joins)
        optimizer = optimizer_of(config, module, group, self.overlaps_gather(module))
        optimizer.facts = f"{config.determinism_key} {self.digest} {optimizer.model.frozen}"
        return optimizer

    def trainer(self, optimizer: Optimizer, emit: Emit) -> Trainer:
        """Build the trainer with its batches and checkpoints. Only rank 0 emits events."""
        return Trainer(optimizer, self.batches(), step_settings(self.settings), self._checkpointer(optimizer, emit))

    def _checkpointer(self, optimizer: Optimizer, emit: Emit) -> Checkpointer:
        config, save, frozen = self.settings, self.settings.checkpoint, optimizer.model.frozen
        state = {"seed": config.seed, "data": self.digest, "frozen": frozen, "config": config.model_dump(mode="json")}

        def report(kind: str, **fields: Any) -> None:
            emit(event(kind, **fields))

        def note(text: str) -> None:
            report("note", text=text)

        facts = RunFacts(
            folder=config.run.dir / "checkpoints",
            state=state,
            files=self.files(optimizer.model),
            folder_mark=partial(read_mark, config.run.dir),
            check=partial(check_resumable, config, (self.digest, frozen), note),
        )
        settings = SaveSettings(save.every, save.keep, save.keep_every, save.on_failure, save.timeout)
        return Checkpointer(optimizer, facts, settings, report)


def allow_faster_kernels(config: RunSettings, device: torch.device) -> None:
    """On a GPU, allow kernels that are not deterministic, if the configuration does."""
    if device.type == "cuda" and not config.deterministic:
        torch.set_deterministic_debug_mode("default")


def optimizer_of(config: RunSettings, module: nn.Module, group: Group, overlap_gather: bool) -> Optimizer:
    """A module on its group, and AdamW over it."""
    parallel = DataParallel(module, group, config.train.slots, config.seed, overlap_gather)
    optim = config.optim
    zero = Zero(config.zero.resolve(config.group.transport), config.zero.replicas)
    return AdamW(parallel, optim.lr, (optim.beta1, optim.beta2), optim.eps, optim.weight_decay, zero)


def computes_in_bf16(config: RunSettings, device: torch.device) -> bool:
    """Whether matrix products are computed in bf16 on a device: on a GPU, unless it is too old or f32 is wanted."""
    precision, on_gpu = config.train.precision, device.type == "cuda"
    can = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "bf16" and not can:
        what = f"train.precision = bf16 does not work on the {torch.cuda.get_device_name(device)}"
        raise UserError(what, "GPUs compute in bf16 from compute capability 8.0 on", "Use --train.precision f32")
    return precision == "bf16" or (precision == "auto" and on_gpu and can)


def step_settings(config: RunSettings) -> StepSettings:
    """The settings of a step."""
    return StepSettings(
        learning_rate=partial(learning_rate, config),
        last_step=config.train.steps,
        clip=config.optim.clip,
        skips_allowed=config.max_skips - 1 if config.on_nonfinite == "skip" else 0,
    )


def learning_rate(config: RunSettings, step: int) -> float:
    """The learning rate of a step."""
    optim = config.optim
    fraction = schedules.rate(optim.schedule, step, config.train.steps, optim.warmup, optim.final_lr)
    return optim.lr * fraction


def inject(config: RunSettings, optimizer: Optimizer) -> None:
    """Arm the faults that the configuration injects."""
    model = optimizer.model
    membership, phases = model.membership, model.phases
    faults = Faults(config.fault, membership.order, membership.rank, model.arena.layout, optimizer.compared_state)
    phases.on_enter = faults.strike
    model.gradients.on_gradient = lambda *gradient: faults.poison(phases.step, *gradient)
